"""Validated calls. The front door (`rapidkda.ops`) builds one of these per call after all checks; backends take nothing
else, so a backend never sees a bad argument and never repeats a check.

A call's `memo` is shared by all calls of its kind: those that differ from it in addresses and in values on the device
only. Tensors have the same shapes, strides, dtypes and devices there, segments the same lengths on the host, and every
plain value is the same. A backend keeps there, under a name of its own, what it decided from nothing else, so that the
next call of the kind starts from it; never a tensor. Only the front door hands out shared ones: a call that is built or
copied elsewhere starts with an empty memo. A backend that could launch such calls from the addresses of their tensors
leaves a `Repeat` in the call that it has run.

Shapes: T tokens of the step, H query/key heads, HV value heads (HV % H == 0), K key dim, V value dim, N segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .segments import Checkpoints, Segments

Op = Literal["prefill", "decode", "verify", "conv", "norm"]
OPS: tuple[Op, ...] = ("prefill", "decode", "verify", "conv", "norm")
GateKind = Literal["log_decay", "bounded", "softplus"]
Rollback = Literal["replay", "slots"]  # how a verification is undone: by records, or from a slot for each position
ROLLBACKS: tuple[Rollback, ...] = ("replay", "slots")

Memo = dict[str, Any]

CHECKPOINT_ALIGNMENT = 16  # tokens; every backend exports states at multiples of this


class Repeat(NamedTuple):
    """How a backend launches a call of a kind that it has seen, without the call.

    Attributes:
        tensors: those of the call that it has run whose addresses a launch takes.
        launch: launches another call of the kind from its addresses in this order. False, with nothing launched, where
            that takes more, as on another device than the current one.
        aligned: of the tensors, those whose addresses must be multiples of 16 for that.
    """

    tensors: tuple[Tensor, ...]
    launch: Callable[[tuple[int, ...]], bool]
    aligned: tuple[Tensor, ...] = ()


@dataclass(slots=True, eq=False)
class Gate:
    """How `g` becomes a log decay.

    log_decay: g already is the log decay (<= 0).
    bounded:   lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), lower_bound in [-5, 0).
    softplus:  -exp(A_log) * softplus(g + dt_bias), without a floor.
    """

    kind: GateKind
    lower_bound: float | None = None
    A_log: Tensor | None = None  # float32 [HV], dense; None means amplitude 1
    dt_bias: Tensor | None = None  # float32 [HV, K], dense; None means 0


@dataclass(slots=True, eq=False)
class Tokens:
    """The token-axis inputs of a KDA call. Strides are free but for the last dimension of q, k, v and g."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV, K] raw logits or log decay, see gate
    beta: Tensor  # [T, HV], both strides free
    gate: Gate
    beta_logits: bool  # beta must pass a sigmoid
    beta_scale: float  # multiplies the sigmoid: 2 with allow_neg_eigval, else 1
    l2norm: bool  # q and k must be L2-normalised (eps 1e-6 under the root)
    scale: float  # multiplies q

    @property
    def count(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def value_heads(self) -> int:
        return self.v.shape[1]

    @property
    def key_dim(self) -> int:
        return self.q.shape[2]

    @property
    def value_dim(self) -> int:
        return self.v.shape[2]


@dataclass(slots=True, eq=False)
class FusedConv:
    """The causal convolution and SiLU in front of a prefill, done by it: q, k and v of its tokens are column slices of
    x, before the convolution. Histories as in `ConvCall`, at the prefill's write slots and checkpoints."""

    x: Tensor  # [T, C], q | k | v
    weight: Tensor  # [C, W]
    pool: Tensor | None  # as ConvCall.pool
    channels_last: bool
    read_slots: Tensor | None  # int32/int64 [N]; padding in it makes the segment padding
    accepted: Tensor | None  # as ConvCall.accepted
    checkpoint_pool: Tensor | None


@dataclass(slots=True, eq=False)
class FusedNorm:
    """The gated norm behind a prefill, done by it, for the rows of its segments; see `NormCall`. The rows of padding
    segments are zero whatever z holds."""

    z: Tensor  # [T, HV, V]
    weight: Tensor  # [V]
    eps: float
    activation: Literal["sigmoid", "silu"]


@dataclass(slots=True, eq=False)
class PrefillCall:
    """Chunked prefill of any number of segments.

    Segment n starts from row read_slots[n] of `initial` where has_initial_state[n], else from zero, and leaves its last
    state in row write_slots[n] of `final`. A slot that is the padding marker, or outside its pool, makes its row
    padding: no state is read or written and its output rows are zero. Pools may be one tensor (in place); a backend
    must then read a slot before it writes it. An empty segment leaves its state as it starts: unchanged, or zero.
    Output rows that no segment covers are not written.
    """

    tokens: Tokens
    segments: Segments
    out: Tensor  # [T, HV, V], dtype of v, last dimension dense
    initial: Tensor | None  # [S, HV, V, K] if state_v_first else [S, HV, K, V]; slot stride free, rest dense
    final: Tensor | None
    read_slots: Tensor | None  # int32/int64 [N], stride free; None: row n belongs to segment n
    write_slots: Tensor | None
    has_initial_state: Tensor | None  # bool/int32/uint8 [N]; None: every segment, if `initial` is given
    state_v_first: bool
    pad_slot: int  # padding marker of slot tensors
    checkpoints: Checkpoints | None  # offsets are multiples of CHECKPOINT_ALIGNMENT
    checkpoint_pool: Tensor | None  # like `final`, any state dtype
    workspace: Tensor | None  # uint8, at least workspace_bytes(); None: the backend allocates
    conv: FusedConv | None = None  # only for backends that said that they fuse it
    norm: FusedNorm | None = None
    memo: Memo = field(init=False, default_factory=dict)
    repeat: Repeat | None = field(init=False, default=None)


@dataclass(slots=True, eq=False)
class DecodeCall:
    """One token for each of N rows, in place on the pool.

    Row n is the token segments.first_token[n] (length 1; length 0 leaves everything untouched).
    """

    tokens: Tokens
    segments: Segments
    out: Tensor  # [T, HV, V]
    pool: Tensor  # as PrefillCall.initial
    read_slots: Tensor  # int32/int64 [N]
    write_slots: Tensor  # int32/int64 [N]
    state_v_first: bool
    pad_slot: int
    memo: Memo = field(init=False, default_factory=dict)
    repeat: Repeat | None = field(init=False, default=None)


@dataclass(slots=True, eq=False)
class VerifyCall:
    """Speculative verification: segment n is 1 + k_n tokens, k_n <= k_max; see `rapidkda.ops.verify`.

    Slot per position (`records` is None): slots [N, 1 + k_max]. Start from slots[n, a - 1] with
    a = clamp(accepted[n], 1, 1 + k_max); the state after token j goes to slots[n, j].

    Replay (`records` given): slots [N]. Apply the first a = clamp(accepted[n], 0, R) records of the slot to its state,
    store that state in the slot, then run the tokens from it and store their records; the state after the tokens is
    not stored. R = 1 + k_max.

    Replay with deferred states (`held` given too): R >= 1 + k_max, and the state is stored only where the records are
    full. For each head, t = min(h + a, R) records are applied, with h = clamp(held[slot], 0, R), or 0 if a is 0. Where
    t records and those of the tokens fit into R rows, the state in memory stays and the new records follow the t ones;
    else the state is stored and they start at row 0. held[slot] becomes the row before which they start.
    """

    tokens: Tokens
    segments: Segments
    out: Tensor  # [T, HV, V]
    pool: Tensor
    slots: Tensor  # int32/int64 [N, 1 + k_max] or [N]
    accepted: Tensor  # int32/int64 [N]
    records: Tensor | None  # float32 [S, R, HV, 2K + V], dense per slot: k | log decay | correction u
    held: Tensor | None  # int32 [S, HV], contiguous
    state_v_first: bool
    pad_slot: int
    memo: Memo = field(init=False, default_factory=dict)
    repeat: Repeat | None = field(init=False, default=None)


@dataclass(slots=True, eq=False)
class CommitCall:
    """Apply the accepted records of each slot to its state, in place; 0 leaves the state bit-unchanged.

    As many as `VerifyCall` applies, with or without `held`, which is left as it is.
    """

    pool: Tensor
    records: Tensor
    held: Tensor | None
    slots: Tensor  # [N]
    accepted: Tensor  # [N]
    state_v_first: bool
    pad_slot: int
    memo: Memo = field(init=False, default_factory=dict)
    repeat: Repeat | None = field(init=False, default=None)


@dataclass(slots=True, eq=False)
class ConvCall:
    """Causal depthwise convolution with history; see `rapidkda.ops.causal_conv`.

    The history of a slot is `window` = pool[slot] as [L, C], oldest first. A segment reads W - 1 entries from offset
    a - 1 with a = clamp(accepted[n], 1, L - W + 2) (offset 0 without `accepted`), or zeros where has_initial_state is
    false. It writes from entry 0: with `keep_all` (verification) the W - 2 newest old entries and all of its tokens,
    else the newest W - 1 entries.
    """

    x: Tensor  # [T, C], last dimension dense
    weight: Tensor  # [C, W], any float dtype
    bias: Tensor | None  # [C]
    out: Tensor  # [T, C]
    segments: Segments
    pool: Tensor | None  # [S, C, L], or [S, L, C] with channels_last; slot stride free
    channels_last: bool
    read_slots: Tensor | None
    write_slots: Tensor | None
    has_initial_state: Tensor | None
    accepted: Tensor | None
    keep_all: bool
    silu: bool
    pad_slot: int
    checkpoints: Checkpoints | None
    checkpoint_pool: Tensor | None
    memo: Memo = field(init=False, default_factory=dict)
    repeat: Repeat | None = field(init=False, default=None)


@dataclass(slots=True, eq=False)
class NormCall:
    """out = rms_norm(x) * weight * activation(z), per head, of every token, or of those of the segments.

    Rows of x that are zero, as a padding segment's are, give zeros whatever z holds.
    """

    x: Tensor  # [T, H, D], last dimension dense
    z: Tensor  # [T, H, D], last dimension dense
    weight: Tensor  # [D]
    eps: float
    activation: Literal["sigmoid", "silu"]
    out: Tensor  # [T, H, D]
    segments: Segments | None = None
    memo: Memo = field(init=False, default_factory=dict)
    repeat: Repeat | None = field(init=False, default=None)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Maxima that a workspace is planned for."""

    tokens: int
    segments: int
    heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
