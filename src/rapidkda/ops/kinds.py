"""Kinds of calls: what was checked and decided for one call holds for every other one of its kind.

Two calls are of one kind when nothing tells them apart but addresses and values on the device: tensors have the same
shapes, strides, dtypes and devices, plain arguments the same types and values, segments and checkpoints the same host
values, and the same backend is asked for. Each operator looks its call up once, and only a call of a new kind goes
through all the checks. What no kind can hold is checked every time: addresses (`bind.apart`, `bind.aligned`). A debug
run (`RAPIDKDA_CHECK`) knows no kinds, since it checks values.

Nothing here ever decides that a call is good: a kind is kept by the call that passed every check, and a call that
cannot be described (an argument of a wrong type, say) is sent through the checks, which tell what is wrong with it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from torch import Tensor

from .. import env
from ..backends.base import Backend
from ..dispatch import Choice
from ..problem import Memo, Tokens
from ..segments import Checkpoints, Segments
from .bind import Terms
from .choose import BackendLike

LIMIT = 1024  # kinds that are kept; the oldest goes first

Key = tuple[Any, ...]

_known: dict[Key, Kind] = {}
_lock = threading.Lock()
_PLAIN = (bool, int, float, str, NoneType)  # what has no parts that could change
_TABLES = (Segments, Checkpoints, NoneType)
_stride = Tensor.stride  # taken from the class: raises TypeError for anything that is no tensor


@dataclass(slots=True, eq=False)
class Kind:
    """What calls of a kind share.

    Attributes:
        backend: serves them.
        terms: of the token-axis inputs; None for operators without them.
        covered: the segments are known to cover all tokens.
        memo: see `rapidkda.problem`.
    """

    backend: Backend
    terms: Terms | None = None
    covered: bool = False
    memo: Memo = field(default_factory=dict)

    def tokens(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
    ) -> Tokens:
        """The token-axis inputs of a call of this kind."""
        if self.terms is None:
            raise TypeError("this kind of call has no token-axis inputs")
        return self.terms.tokens(q, k, v, g, beta, A_log, dt_bias)


def find(
    op: str,
    backend: BackendLike,
    variable: str,
    segments: Segments | None,
    checkpoints: Checkpoints | None,
    tensors: tuple[Tensor | None, ...],
    plain: tuple[Any, ...],
) -> tuple[Key | None, Kind | None]:
    """The key of a call's kind, None if it has none, and the kind, None if it is new.

    Args:
        variable: the environment variable that names the backend where `backend` is None.
        tensors: every tensor argument, in a fixed order.
        plain: every other argument, in a fixed order.
    """
    if env.check_device_values() or not isinstance(segments, _TABLES) or not isinstance(checkpoints, _TABLES):
        return None, None
    try:
        key = (
            op,
            None if segments is None else segments.kind,
            None if checkpoints is None else checkpoints.kind,
            tuple([None if x is None else (x.shape, _stride(x), x.dtype, x.device) for x in tensors]),
            plain,
            tuple(map(type, plain)),
            env.backend_name(variable) if backend is None else None,
            backend.name if isinstance(backend, Choice) else backend,
        )
        return key, _known.get(key)
    except (AttributeError, TypeError, RuntimeError):
        return None, None


def keep(key: Key | None, kind: Kind) -> Kind:
    """Keep a kind whose call has passed every check; returns it. 0.0 and -0.0 are one key, so they are not kept."""
    if key is None:
        return kind
    *_, plain, types, _, name = key
    if all(t in _PLAIN for t in (*types, type(name))) and not any(type(x) is float and x == 0.0 for x in plain):
        with _lock:
            while len(_known) >= LIMIT:
                del _known[next(iter(_known))]
            _known[key] = kind
    return kind


def forget() -> None:
    """Drop every kind: for tests that change what backends there are."""
    with _lock:
        _known.clear()
