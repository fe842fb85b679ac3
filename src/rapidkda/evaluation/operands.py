"""Instruments that stand before a backend: one narrows operands to bfloat16, one keeps what the operator sees.

Both are backends themselves (`rapidkda.backends.base`), so that the engine runs through them as it runs through any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from ..backends.base import Backend, Request
from ..problem import CommitCall, ConvCall, DecodeCall, NormCall, Op, PrefillCall, Sizes, Tokens, VerifyCall

KdaCall = TypeVar("KdaCall", PrefillCall, DecodeCall, VerifyCall)
NARROW = torch.bfloat16


class NarrowOperands:
    """The KDA operators of other backends on bfloat16 operands, inside a model of any dtype.

    q, k, v, g and beta are rounded to bfloat16 before the operator and its outputs are bfloat16 values; states stay
    what the pool holds. Convolution and norm are `plain`'s, in the model's dtype, so that nothing but the operator
    changes with the backend.

    Args:
        name: as reports show it.
        prefill: runs prefill.
        decode: runs decode, verify and commit.
        plain: runs convolution and norm.
    """

    def __init__(self, name: str, prefill: Backend, decode: Backend, plain: Backend):
        self.name = name
        self._prefill = prefill
        self._decode = decode
        self._plain = plain

    def unmet(self, request: Request) -> list[str]:
        if request.op in ("conv", "norm"):
            return self._plain.unmet(request)
        inner = self._prefill if request.op == "prefill" else self._decode
        return inner.unmet(replace(request, dtype=NARROW, gate_dtype=NARROW, beta_dtype=NARROW))

    def workspace_bytes(self, op: Op, sizes: Sizes) -> int:
        if op in ("conv", "norm"):
            return self._plain.workspace_bytes(op, sizes)
        inner = self._prefill if op == "prefill" else self._decode
        return inner.workspace_bytes(op, replace(sizes, dtype=NARROW))

    def prefill(self, call: PrefillCall) -> None:
        _narrowed(self._prefill.prefill, call)

    def decode(self, call: DecodeCall) -> None:
        _narrowed(self._decode.decode, call)

    def verify(self, call: VerifyCall) -> None:
        _narrowed(self._decode.verify, call)

    def commit(self, call: CommitCall) -> None:
        self._decode.commit(call)

    def conv(self, call: ConvCall) -> None:
        self._plain.conv(call)

    def norm(self, call: NormCall) -> None:
        self._plain.norm(call)


def _narrowed(run: Callable[[KdaCall], None], call: KdaCall) -> None:
    """Rows of other kinds of the step are in `out` too: they are bfloat16 values already, or not written yet."""
    tokens, out = call.tokens, call.out.to(NARROW)
    q, k, v, g, beta = (x.to(NARROW) for x in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta))
    run(replace(call, tokens=replace(tokens, q=q, k=k, v=v, g=g, beta=beta), out=out))
    call.out.copy_(out)


class Forwarding:
    """Another backend under a name of its own; subclasses change what they override.

    Args:
        name: as reports show it.
        inner: does the work.
    """

    def __init__(self, name: str, inner: Backend):
        self.name = name
        self.inner = inner

    def unmet(self, request: Request) -> list[str]:
        return self.inner.unmet(request)

    def workspace_bytes(self, op: Op, sizes: Sizes) -> int:
        return self.inner.workspace_bytes(op, sizes)

    def prefill(self, call: PrefillCall) -> None:
        self.inner.prefill(call)

    def decode(self, call: DecodeCall) -> None:
        self.inner.decode(call)

    def verify(self, call: VerifyCall) -> None:
        self.inner.verify(call)

    def commit(self, call: CommitCall) -> None:
        self.inner.commit(call)

    def conv(self, call: ConvCall) -> None:
        self.inner.conv(call)

    def norm(self, call: NormCall) -> None:
        self.inner.norm(call)


class Recording(Forwarding):
    """Keeps a copy of every prefill's operands in `seen`, in the order of the calls."""

    def __init__(self, name: str, inner: Backend):
        super().__init__(name, inner)
        self.seen: list[Tokens] = []

    def prefill(self, call: PrefillCall) -> None:
        self.seen.append(_copy(call.tokens))
        super().prefill(call)


def _copy(tokens: Tokens) -> Tokens:
    q, k, v, g, beta = (x.clone() for x in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta))
    return replace(tokens, q=q, k=k, v=v, g=g, beta=beta)
