"""Kinds of calls: what was checked and decided for one call holds for every other one of its kind.

Two calls are of one kind when nothing tells them apart but addresses and values on the device: tensors have the same
shapes, strides, dtypes and devices, plain arguments the same types and values, segments and checkpoints the same host
values, and the same backend is asked for. Each operator looks its call up once, and only a call of a new kind goes
through all the checks. What no kind can hold is checked every time: addresses (`bind.apart`, `bind.aligned`). A debug
run (`RAPIDKDA_CHECK`) knows no kinds, since it checks values.

Reading the metadata of a dozen tensors in Python takes longer than the rest of a call's checks. So a kind is looked for
twice: first by everything but its tensors, whose metadata torch compares in one call (the guard of its compiler), then
by a key that holds the metadata.

What a kind knows in the end is how its calls are launched from addresses (`repeats`), where the backend can say so.

Nothing here ever decides that a call is good: a kind is kept by the call that passed every check, and a call that
cannot be described (an argument of a wrong type, say) is sent through the checks, which tell what is wrong with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from torch import Tensor

from .. import env
from ..backends.base import Backend
from ..dispatch import Choice, is_guest
from ..problem import Memo, Repeat, Tokens
from ..segments import Checkpoints, Segments
from .bind import Terms
from .choose import BackendLike
from .repeats import Repeater

LIMIT = 1024  # kinds that are kept; the oldest goes first
_MOST_GUARDS = 8
_MOST_LESSONS = 4

Key = tuple[Any, ...]

_known: dict[Key, Kind] = {}
_latest: dict[Key, Kind] = {}  # by the key without the metadata of tensors
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
        guard: whether tensors have the metadata of this kind's; None if torch cannot say.
        guards: how many guards have been made: one that refuses what the key accepts was made in another mode of torch.
        again: launches a call from its addresses, once that is known.
        lessons: how often it was tried to find that out.
    """

    backend: Backend
    terms: Terms | None = None
    covered: bool = False
    memo: Memo = field(default_factory=dict)
    guard: Callable[..., bool] | None = None
    guards: int = 0
    again: Repeater | None = None
    lessons: int = 0

    def tokens(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
    ) -> Tokens:
        """The token-axis inputs of a call of this kind."""
        if self.terms is None:
            raise TypeError("this kind of call has no token-axis inputs")
        return self.terms.tokens(q, k, v, g, beta, A_log, dt_bias)

    def repeats(self, given: list[Tensor], segments: Segments | None, checkpoints: Checkpoints | None) -> bool:
        """Launch a call of this kind from its addresses; False where it has to go the usual way."""
        return self.again is not None and self.again(given, segments, checkpoints)

    def learn(self, repeat: Repeat | None, *arguments: Any) -> None:
        """Find out how calls of this kind are launched, from one that has run: `arguments` of `Repeater`."""
        if repeat is None or self.again is not None or self.lessons >= _MOST_LESSONS or is_guest(self.backend):
            return
        self.lessons += 1
        with suppress(LookupError):  # a tensor of the call is none of the arguments
            self.again = Repeater(repeat, *arguments)


def find(
    op: str,
    backend: BackendLike,
    variable: str,
    segments: Segments | None,
    checkpoints: Checkpoints | None,
    tensors: tuple[Tensor | None, ...],
    plain: tuple[Any, ...],
) -> tuple[Key | None, Kind | None, list[Tensor]]:
    """The kind of a call, None if it is new, the key to keep a new one by, None if it cannot be kept, and the tensors
    that are not None.

    Args:
        variable: the environment variable that names the backend where `backend` is None.
        tensors: every tensor argument, in a fixed order.
        plain: every other argument, in a fixed order.
    """
    if env.check_device_values() or not isinstance(segments, _TABLES) or not isinstance(checkpoints, _TABLES):
        return None, None, []
    try:
        frame = (
            op,
            None if segments is None else segments.kind,
            None if checkpoints is None else checkpoints.kind,
            plain,
            tuple(map(type, (*tensors, *plain))),
            env.backend_name(variable) if backend is None else None,
            backend.name if isinstance(backend, Choice) else backend,
        )
        given = [x for x in tensors if x is not None]
        kind = _latest.get(frame)
        if kind is not None and kind.guard is not None and kind.guard(*given):
            return None, kind, given
        # A process has one kind of accelerator, so its ordinal says all of a device; -1 is the CPU or no real device.
        key = (
            frame,
            tuple(
                [(x.shape, _stride(x), x.dtype, place if (place := x.get_device()) >= 0 else x.device) for x in given]
            ),
        )
        kind = _known.get(key)
    except (AttributeError, TypeError, RuntimeError):
        return None, None, []
    if kind is not None:
        _prefer(frame, kind, given)
    return key, kind, given


def keep(key: Key | None, kind: Kind) -> Kind:
    """Keep a kind whose call has passed every check; returns it. 0.0 and -0.0 are one key, so they are not kept."""
    if key is None:
        return kind
    plain, name = key[0][3], key[0][-1]
    if all(type(x) in _PLAIN for x in (*plain, name)) and not any(type(x) is float and x == 0.0 for x in plain):
        with _lock:
            while len(_known) >= LIMIT:
                del _known[next(iter(_known))]
            _known[key] = kind
    return kind


def forget() -> None:
    """Drop every kind: for tests that change what backends there are."""
    with _lock:
        _known.clear()
        _latest.clear()


def _prefer(frame: Key, kind: Kind, given: list[Tensor]) -> None:
    """From now on this kind is the first to be looked at among those that differ in their tensors only."""
    if kind.guards < _MOST_GUARDS:
        kind.guards += 1
        kind.guard = _guard(given)
    with _lock:
        while len(_latest) >= LIMIT:
            del _latest[next(iter(_latest))]
        _latest[frame] = kind


def _guard(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """A function that says whether tensors have the types, shapes, strides, dtypes and devices of these."""
    try:
        from torch._C._dynamo import guards as dynamo

        make: Any = dynamo.TensorGuards
        guards = make(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],  # no dimension may change
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        )
        check: Callable[..., bool] = guards.check
        return check if check(*tensors) else None
    except (
        ImportError,
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
        SystemError,
    ):  # private to torch, so it may change
        return None
