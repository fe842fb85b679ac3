"""Backends that are wrong on purpose, each in a way that real ones have been: the battery must fail them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rapidkda.dispatch import load
from rapidkda.evaluation.operands import Forwarding
from rapidkda.problem import CommitCall, DecodeCall, PrefillCall, VerifyCall

CHUNK = 64


class Passing(Forwarding):
    """The torch backend under another name. Subclasses break what they override."""

    def __init__(self) -> None:
        super().__init__("broken-" + type(self).__name__.lower(), load("torch"))


class Healthy(Passing):
    """Nothing is wrong with it."""


def _change(pool: Tensor, slots: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    rows = slots.flatten().long()
    pool[rows] = change(pool[rows])


def _fp8(states: Tensor) -> Tensor:
    """Round states [N, HV, V, K] to e4m3, scaled so that each head's largest entry is representable."""
    scale = states.abs().amax((-2, -1), keepdim=True).clamp_min(1e-30) / 448.0
    return (states / scale).to(torch.float8_e4m3fn).to(states.dtype) * scale


class Fp8States(Passing):
    """States are stored in 8 bits between chunks and steps."""

    def prefill(self, call: PrefillCall) -> None:
        super().prefill(call)
        assert call.final is not None
        assert call.write_slots is not None
        _change(call.final, call.write_slots, _fp8)

    def decode(self, call: DecodeCall) -> None:
        super().decode(call)
        _change(call.pool, call.write_slots, _fp8)

    def verify(self, call: VerifyCall) -> None:
        super().verify(call)
        _change(call.pool, call.slots, _fp8)


class DroppedChunk(Passing):
    """The second chunk of every longer prefill neither decays the state nor writes to it."""

    def prefill(self, call: PrefillCall) -> None:
        tokens = call.tokens
        g, beta = tokens.g.clone(), tokens.beta.clone()
        for first, length in zip(*call.segments.host_values()):
            rows = slice(int(first) + CHUNK, int(first) + min(2 * CHUNK, int(length)))
            g[rows], beta[rows] = -torch.inf, -torch.inf
        super().prefill(replace(call, tokens=replace(tokens, g=g, beta=beta)))


class SwappedLayout(Passing):
    """Prefill leaves states as [K, V], and all that follows reads them as [V, K]."""

    def prefill(self, call: PrefillCall) -> None:
        super().prefill(call)
        assert call.final is not None
        assert call.write_slots is not None
        _change(call.final, call.write_slots, lambda states: states.transpose(-1, -2).contiguous())


class ForgottenState(Passing):
    """Every chunk of a prompt starts from zero."""

    def prefill(self, call: PrefillCall) -> None:
        fresh = torch.zeros_like(call.segments.length, dtype=torch.bool)
        super().prefill(replace(call, has_initial_state=fresh))


class KeptDrafts(Passing):
    """Rejected drafts stay in the state: all of a step's tokens count as accepted."""

    def verify(self, call: VerifyCall) -> None:
        super().verify(replace(call, accepted=self._all(call, call.accepted)))

    def commit(self, call: CommitCall) -> None:
        super().commit(replace(call, accepted=self._all(call, call.accepted)))

    @staticmethod
    def _all(call: Any, accepted: Tensor) -> Tensor:
        most = call.records.shape[1]
        return torch.where(accepted > 0, torch.full_like(accepted, most), accepted)


class NoDecay(Passing):
    """Decode leaves the decay out."""

    def decode(self, call: DecodeCall) -> None:
        tokens = call.tokens
        super().decode(replace(call, tokens=replace(tokens, g=torch.full_like(tokens.g, -torch.inf))))


class WrongHead(Passing):
    """Verification writes its outputs with the heads shifted by one."""

    def verify(self, call: VerifyCall) -> None:
        super().verify(call)
        for first, length in zip(*call.segments.host_values()):
            rows = slice(int(first), int(first + length))
            call.out[rows] = call.out[rows].roll(1, dims=1)


BROKEN = (Fp8States, DroppedChunk, SwappedLayout, ForgottenState, KeptDrafts, NoDecay, WrongHead)
