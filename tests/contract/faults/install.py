"""How a fault is put into the torch backend.

Each wraps a method of the backend and changes the validated call before it, or the memory after it, so that none
depends on how the backend works inside; the numerical ones put a textbook chunked form with one wrong step there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from rapidkda.backends.torch import TorchBackend
from rapidkda.problem import PrefillCall

from . import textbook

KdaCall = Any  # PrefillCall, DecodeCall or VerifyCall: they share tokens, segments and out
Method = Callable[[TorchBackend, Any], None]


@dataclass(frozen=True)
class Fault:
    """A fault: `install()` breaks the torch backend while it is entered; some case of `caught_by` must then fail."""

    name: str
    install: Callable[[], AbstractContextManager[None]]
    caught_by: tuple[str, ...]


FAULTS: dict[str, Fault] = {}


def wraps(*methods: str, caught_by: tuple[str, ...]) -> Callable[[Callable[[Method, Any], None]], None]:
    """Register a fault that replaces backend methods by `broken(original, call)`."""

    def register(broken: Callable[[Method, Any], None]) -> None:
        @contextmanager
        def install() -> Iterator[None]:
            patches = [patch.object(TorchBackend, name, as_method(name, broken)) for name in methods]
            for each in patches:
                each.start()
            try:
                yield
            finally:
                for each in patches:
                    each.stop()

        FAULTS[broken.__name__] = Fault(broken.__name__, install, caught_by)

    return register


def as_method(name: str, broken: Callable[[Any, Any], None]) -> Method:
    original = getattr(TorchBackend, name)

    def method(self: TorchBackend, call: Any) -> None:
        broken(lambda changed: original(self, changed), call)

    return method


def replaces(module: Any, name: str, *, caught_by: tuple[str, ...]) -> Callable[[Callable[..., Any]], None]:
    """Register a fault that replaces one function; the replacement gets the original as its first argument."""

    def register(broken: Callable[..., Any]) -> None:
        original = getattr(module, name)

        @contextmanager
        def install() -> Iterator[None]:
            with patch.object(module, name, lambda *args, **kwargs: broken(original, *args, **kwargs)):
                yield

        FAULTS[broken.__name__] = Fault(broken.__name__, install, caught_by)

    return register


KDA = ("prefill", "decode", "verify")


def with_tokens(call: KdaCall, **changes: Any) -> KdaCall:
    return replace(call, tokens=replace(call.tokens, **changes))


def with_gate(call: KdaCall, **changes: Any) -> KdaCall:
    return with_tokens(call, gate=replace(call.tokens.gate, **changes))


def lengths(call: Any) -> list[int]:
    return [int(n) for n in call.segments.host_values()[1]]


def textbook_fault(name: str, *caught_by: str, **switches: Any) -> None:
    """Register a fault that replaces prefill by the textbook form with these switches."""

    def broken(original: Any, call: PrefillCall) -> None:
        if call.checkpoints is None:
            textbook.prefill(call, textbook.Switches(**switches))
        else:
            original(call)

    broken.__name__ = name
    wraps("prefill", caught_by=caught_by)(broken)
