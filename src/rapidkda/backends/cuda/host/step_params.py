"""The one parameter of verification and commit, packed as `struct StepParams` of csrc/step_params.cuh lies in memory.

Addresses differ from call to call and come first; what follows is shared by calls of a kind.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

SIZE = 320  # sizeof(StepParams)


class Flags:
    """Bits of `StepParams.flags`; plain ints, because enum arithmetic costs a microsecond an operation."""

    BETA_FLOAT = 1 << 0
    BETA_LOGITS = 1 << 1
    L2_NORM = 1 << 2
    GATE_FLOAT = 1 << 3
    BOUNDED_GATE = 1 << 4
    SOFTPLUS_GATE = 1 << 5
    STATE_V_FIRST = 1 << 6
    SLOTS_64 = 1 << 7
    ACCEPTED_64 = 1 << 8
    VECTOR_INPUTS = 1 << 9
    VECTOR_STATES = 1 << 10
    VECTOR_RECORDS = 1 << 11


# In the order of the C struct; 0 where a tensor is absent.
ADDRESSES = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "A_log",
    "dt_bias",
    "out",
    "pool",
    "records",
    "first_token",
    "length",
    "slots",
    "accepted",
    "held",
)


class Constants(NamedTuple):
    """The fields after the addresses, in the order of the C struct. Strides count elements."""

    q_token_stride: int = 0
    q_head_stride: int = 0
    k_token_stride: int = 0
    k_head_stride: int = 0
    v_token_stride: int = 0
    v_head_stride: int = 0
    g_token_stride: int = 0
    g_head_stride: int = 0
    beta_token_stride: int = 0
    beta_head_stride: int = 0
    out_token_stride: int = 0
    out_head_stride: int = 0
    pool_stride: int = 0
    record_stride: int = 0
    record_position_stride: int = 0
    first_stride: int = 0
    length_stride: int = 0
    slot_stride: int = 0
    accepted_stride: int = 0
    tokens: int = 0
    segments: int = 0
    value_heads: int = 0
    group: int = 1
    pool_rows: int = 0
    pad_slot: int = 0
    positions: int = 1
    flags: int = 0
    scale: float = 1.0
    beta_scale: float = 1.0
    lower_bound: float = 0.0
    reserved: int = 0


_CONSTANTS = struct.Struct("<19q7iI3fi")


def addresses(present: Sequence[bool]) -> struct.Struct:
    """Layout of those addresses that are present; the others are packed as 0."""
    return struct.Struct("<" + "".join("Q" if here else "8x" for here in present))


def pack(constants: Constants) -> bytes:
    """All of the parameter, with the addresses left open."""
    return bytes(8 * len(ADDRESSES)) + _CONSTANTS.pack(*constants)
