"""Which backend serves each operator of a layer: chosen once, at construction, with its reasons."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from .. import dispatch, env
from ..backends.base import Request
from ..dispatch import AUTO, Choice
from ..errors import BackendUnavailable
from ..problem import Op

log = logging.getLogger("rapidkda")

# A layer is built before the pool that says how drafts are undone, and backends need not have both forms of rollback:
# "verify" is verification by replay, with deferred states or without, and commit.
LayerOp = Literal["prefill", "decode", "verify", "verify_slots", "conv", "norm"]


@dataclass(frozen=True, slots=True)
class BackendWish:
    """What the configuration asks for; None where it says nothing.

    Attributes:
        prefill: explicit name of the prefill backend.
        prefill_flag: value of the engine's `--kda-prefill-backend`.
        decode: explicit name of the decode and verify backend.
        decode_flag: value of the engine's `--kda-decode-backend`.
        additional_config: the engine's additional config; its keys `kda_prefill_backend` and `kda_decode_backend`.

    The environment variables RAPIDKDA_PREFILL_BACKEND and RAPIDKDA_DECODE_BACKEND are the last sources.
    """

    prefill: str | None = None
    prefill_flag: str | None = None
    decode: str | None = None
    decode_flag: str | None = None
    additional_config: Mapping[str, Any] | None = None


def choose(wish: BackendWish, request: Request) -> dict[LayerOp, Choice]:
    """One choice an operator and form of rollback, for layers whose calls look like `request`.

    The decode knob binds decode and verify; the convolution and the norm take the same backend where it has them and
    the fastest other one where it has not.

    Raises ValueError (unknown name), `ConfigConflict` (two sources disagree) or `BackendUnavailable` (the backend asked
    for cannot run).
    """
    prefill = dispatch.wish(
        backend=wish.prefill, engine_flag=wish.prefill_flag, additional_config=wish.additional_config
    )
    decode = dispatch.wish(
        backend=wish.decode,
        engine_flag=wish.decode_flag,
        additional_config=wish.additional_config,
        variable=env.DECODE_BACKEND,
        key=dispatch.DECODE_CONFIG_KEY,
        flag=dispatch.DECODE_ENGINE_FLAG,
    )
    return dict(_choose(prefill, decode, request))


@functools.lru_cache(maxsize=256)
def _choose(prefill: tuple[str, str], decode: tuple[str, str], request: Request) -> tuple[tuple[LayerOp, Choice], ...]:
    """Cached, so that a model of many layers logs its choice once."""
    choices: list[tuple[LayerOp, Choice]] = []
    label: LayerOp
    for label in get_args(LayerOp):
        op: Op = "verify" if label == "verify_slots" else label
        asked = replace(
            request,
            op=op,
            checkpoints=request.checkpoints and op == "prefill",
            rollback="slots" if label == "verify_slots" else "replay",
            deferred=label == "verify",
        )
        name, source = prefill if op == "prefill" else decode
        choice = (_follow if op in ("conv", "norm") else dispatch.resolve)(asked, name, source)
        log.info("KDA %s on %s: %s", label, request.device, choice)
        choices.append((label, choice))
    return tuple(choices)


def _follow(request: Request, name: str, source: str) -> Choice:
    """The named backend if it has this operator, else the fastest that has."""
    if name == AUTO:
        return dispatch.resolve(request)
    try:
        return dispatch.resolve(request, name, source)
    except BackendUnavailable as refused:
        other = dispatch.resolve(request)
        return replace(other, passed_over={**other.passed_over, **refused.reasons})
