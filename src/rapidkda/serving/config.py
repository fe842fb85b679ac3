"""What a KDA layer's state looks like, and how large a step may be: plain values that pools, steps and workspaces are
planned from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .. import checks
from ..problem import ROLLBACKS, Rollback


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one request in one layer, on one tensor-parallel rank.

    Attributes:
        heads: query/key heads of this rank.
        key_dim, value_dim: head dims K and V.
        value_heads: HV, a multiple of `heads` (default: `heads`).
        conv_width: taps W of the causal convolution; its state is the last W - 1 inputs.
        state_dtype: of the recurrent state, float32 or bfloat16.
        conv_dtype: of the convolution history; the dtype of the activations keeps it exact.
        max_drafts: k_max, the most draft tokens of a verify step; 0 without speculation.
        rollback: how a verify step is undone. "replay": one state a request and a compact record a token.
            "slots": one state a token, so a request takes 1 + k_max slots.
        record_rows: records that a slot holds with replay, at least 1 + k_max (default: twice that, and at least 8).
            Above 1 + k_max states are deferred: one is stored only where its records are full. Without drafts there are
            records only where this is given, at least 2: verification of one token is then a decode whose state is
            deferred.
        conv_channels_last: history pool [S, L, C] (as the token axis lies in memory) instead of [S, C, L].
    """

    heads: int
    key_dim: int = 128
    value_dim: int = 128
    value_heads: int = 0
    conv_width: int = 4
    state_dtype: torch.dtype = torch.float32
    conv_dtype: torch.dtype = torch.bfloat16
    max_drafts: int = 0
    rollback: Rollback = "replay"
    record_rows: int | None = None
    conv_channels_last: bool = True

    def __post_init__(self) -> None:
        for name, minimum in (("heads", 1), ("key_dim", 1), ("value_dim", 1), ("conv_width", 2), ("max_drafts", 0)):
            checks.integer(name, getattr(self, name), minimum)
        if self.value_heads == 0:
            object.__setattr__(self, "value_heads", self.heads)
        if checks.integer("value_heads", self.value_heads, 1) % self.heads:
            raise ValueError(f"value_heads must be a multiple of the {self.heads} heads, got {self.value_heads}")
        _dtype("state_dtype", self.state_dtype, checks.STATE_DTYPES)
        _dtype("conv_dtype", self.conv_dtype, checks.FLOATS)
        checks.choice("rollback", self.rollback, ROLLBACKS)
        if self.record_rows is not None:
            checks.integer("record_rows", self.record_rows, 1)
            if self.has_records and self.record_rows <= max(1, self.max_drafts):
                least = f"at least {1 + self.max_drafts} (1 + k_max), the tokens of a verify step"
                if self.max_drafts == 0:
                    least = "at least 2 with max_drafts = 0 (one record defers nothing)"
                raise ValueError(f"record_rows must be {least}, got {self.record_rows}")
        checks.boolean("conv_channels_last", self.conv_channels_last)

    @property
    def conv_channels(self) -> int:
        """C: the channels of q, k and v side by side."""
        return 2 * self.heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def conv_parts(self) -> tuple[int, int, int]:
        """Channels of q, of k and of v."""
        return self.heads * self.key_dim, self.heads * self.key_dim, self.value_heads * self.value_dim

    @property
    def conv_length(self) -> int:
        """L = W - 1 + k_max entries of history."""
        return self.conv_width - 1 + self.max_drafts

    @property
    def slots_per_request(self) -> int:
        return 1 + self.max_drafts if self.rollback == "slots" else 1

    @property
    def has_records(self) -> bool:
        return self.rollback == "replay" and (self.max_drafts > 0 or self.record_rows is not None)

    @property
    def verify_tokens(self) -> int:
        """Most tokens of a verify step, 1 + k_max; 0 where nothing is verified."""
        return 1 + self.max_drafts if self.max_drafts > 0 or self.has_records else 0

    @property
    def records_per_slot(self) -> int:
        """R, 0 without records."""
        if not self.has_records:
            return 0
        return max(8, 2 * (1 + self.max_drafts)) if self.record_rows is None else self.record_rows

    @property
    def defers(self) -> bool:
        """Whether states are stored only where their records are full."""
        return self.records_per_slot > 1 + self.max_drafts

    def recurrent(self, num_slots: int) -> tuple[int, ...]:
        """[S, HV, V, K]"""
        return num_slots, self.value_heads, self.value_dim, self.key_dim

    def conv(self, num_slots: int) -> tuple[int, ...]:
        """[S, L, C], or [S, C, L] without conv_channels_last"""
        inner = (self.conv_length, self.conv_channels)
        return (num_slots, *(inner if self.conv_channels_last else inner[::-1]))

    def records(self, num_slots: int) -> tuple[int, ...]:
        """[S, R, HV, 2K + V]"""
        return num_slots, self.records_per_slot, self.value_heads, 2 * self.key_dim + self.value_dim

    def held(self, num_slots: int) -> tuple[int, ...]:
        """[S, HV]"""
        return num_slots, self.value_heads


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: what step tables and workspaces are planned for.

    Attributes:
        max_tokens: rows of the token axis, padding included (max_num_batched_tokens).
        max_requests: requests of a step (max_num_seqs).
        max_prefills, max_decodes, max_verifies: of those, of one kind (default: `max_requests` each).
        max_checkpoints: prefix-cache checkpoints of a step (default: one for every 16 tokens).
    """

    max_tokens: int
    max_requests: int
    max_prefills: int = field(default=-1)
    max_decodes: int = field(default=-1)
    max_verifies: int = field(default=-1)
    max_checkpoints: int = field(default=-1)

    def __post_init__(self) -> None:
        checks.integer("max_tokens", self.max_tokens, 1)
        checks.integer("max_requests", self.max_requests, 1)
        for name in ("max_prefills", "max_decodes", "max_verifies"):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, self.max_requests)
            checks.integer(name, getattr(self, name), 0)
        if self.max_checkpoints == -1:
            object.__setattr__(self, "max_checkpoints", self.max_tokens // 16)
        checks.integer("max_checkpoints", self.max_checkpoints, 0)


def _dtype(name: str, value: object, allowed: tuple[torch.dtype, ...]) -> None:
    if value not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must be one of {names}, got {value!r}")
