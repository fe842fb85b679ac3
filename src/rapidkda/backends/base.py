"""The backend contract.

A backend differs from another in speed only. It takes validated calls (`rapidkda.problem`), writes `call.out` and the
pools in place, returns nothing, and never synchronises with the device when host values were given. Before it is
chosen it answers one question: what of this request can it not do here? What it decides for a kind of call it may keep
in the call's memo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..device import Device
from ..problem import (
    CommitCall,
    ConvCall,
    DecodeCall,
    GateKind,
    NormCall,
    Op,
    PrefillCall,
    Rollback,
    Sizes,
    Tokens,
    VerifyCall,
)
from ..segments import Segments


@dataclass(frozen=True)
class Request:
    """What a caller is going to ask for, as plain values: enough for a backend to say yes, or why not."""

    op: Op
    device: Device
    dtype: torch.dtype = torch.bfloat16
    key_dim: int = 128
    value_dim: int = 128
    gate: GateKind = "bounded"
    state_dtype: torch.dtype = torch.float32
    grouped_values: bool = False  # HV > H
    requires_grad: bool = False
    checkpoints: bool = False
    gate_dtype: torch.dtype | None = None  # of g and beta; None: as dtype
    beta_dtype: torch.dtype | None = None
    raw_keys: bool = True  # q and k before their L2 normalisation
    raw_beta: bool = True  # logits
    neg_eigval: bool = False  # the sigmoid of beta doubled
    rollback: Rollback = "replay"  # of verify; a commit belongs to replay
    deferred: bool = False  # replay that stores states only where records are full (`held`)
    state_v_first: bool = True
    records: int | None = None  # of a slot, with replay; None: not known
    most_tokens: int | None = None  # of a request of verify; None: not known


class Backend(Protocol):
    """One implementation of the operators."""

    name: str

    def unmet(self, request: Request) -> list[str]:
        """Every requirement of this backend that the request or this machine does not meet; empty if it can run."""
        ...

    def workspace_bytes(self, op: Op, sizes: Sizes) -> int:
        """Scratch bytes that a call within `sizes` needs from the caller's workspace."""
        ...

    def prefill(self, call: PrefillCall) -> None: ...

    def decode(self, call: DecodeCall) -> None: ...

    def verify(self, call: VerifyCall) -> None: ...

    def commit(self, call: CommitCall) -> None: ...

    def conv(self, call: ConvCall) -> None: ...

    def norm(self, call: NormCall) -> None: ...


@runtime_checkable
class FusingBackend(Protocol):
    """A backend whose prefill can do its neighbours in a layer: the convolution before it, the gated norm after it."""

    def unfused(self, call: PrefillCall) -> dict[str, list[str]]:
        """Why calls of this kind (nothing else of it may count) leave `conv` or `norm` to operators of their own; a
        neighbour that is not named is done by `prefill`, given `call.conv` and `call.norm`."""
        ...


@runtime_checkable
class LeadingBackend(Protocol):
    """A backend that serves some requests faster than those which stand before it in auto's order."""

    def leads(self, request: Request) -> bool:
        """Whether `auto` asks this backend first for the request."""
        ...


@runtime_checkable
class DifferentiableBackend(Protocol):
    """A backend that autograd can differentiate: whole sequences, out of place."""

    def forward(
        self, tokens: Tokens, segments: Segments, initial: Tensor | None, state_v_first: bool
    ) -> tuple[Tensor, Tensor]:
        """Outputs [T, HV, V] and final states [N, HV, K, V] ([N, HV, V, K] with state_v_first)."""
        ...
