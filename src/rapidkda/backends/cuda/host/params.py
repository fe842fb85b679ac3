"""The one parameter of the prefill kernels, packed as `struct Params` of csrc/params.cuh lies in memory.

Its fields are in two parts: tensor maps and addresses, which differ from call to call, and what calls of a kind share.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

ORDER_ENTRIES = 64
SCALED_UP = 2.0**4  # of the queries' scale; `Range` of csrc/recurrence.cuh takes it back
SIZE = 1728  # sizeof(Params): its alignment is that of a tensor map, 64


class Flags:
    """Bits of `Params.flags`; plain ints, because enum arithmetic costs a microsecond an operation."""

    BETA_FLOAT = 1 << 0
    BETA_LOGITS = 1 << 1
    L2_NORM = 1 << 2
    RAW_GATE = 1 << 3
    STATE_V_FIRST = 1 << 4
    INITIAL_FLOAT = 1 << 5
    FINAL_FLOAT = 1 << 6
    CHECKPOINT_FLOAT = 1 << 7
    READ_SLOTS_64 = 1 << 8
    WRITE_SLOTS_64 = 1 << 9
    INITIAL_FLAG_32 = 1 << 10
    ORDERED = 1 << 11
    VECTOR_STATES = 1 << 12
    GATE_FLOAT = 1 << 13
    SCHEDULED = 1 << 14


# The addresses, after the four tensor maps, in the order of the C struct; 0 where a tensor is absent.
ADDRESSES = (
    "beta",
    "A_log",
    "dt_bias",
    "out",
    "initial",
    "final",
    "checkpoint_pool",
    "first_token",
    "length",
    "read_slots",
    "write_slots",
    "has_initial",
    "checkpoint_begin",
    "checkpoint_offset",
    "checkpoint_slot",
    "transitions",
    "start_queries",
    "seams",
)


class Constants(NamedTuple):
    """The fields after the addresses and before the launch order, in the order of the C struct. Strides count
    elements."""

    beta_token_stride: int
    beta_head_stride: int
    out_token_stride: int
    out_head_stride: int
    initial_stride: int
    final_stride: int
    checkpoint_stride: int
    read_stride: int
    write_stride: int
    has_initial_stride: int
    tokens: int
    segments: int
    value_heads: int
    group: int
    initial_rows: int
    final_rows: int
    checkpoint_rows: int
    pad_slot: int
    parts: int
    flags: int
    scale: float
    beta_scale: float
    lower_bound: float
    checkpoints: int


_CONSTANTS = struct.Struct("<10q9iI3fi128s768s")
_MAPS = "512s"


def addresses(present: Sequence[bool], before: str = "") -> struct.Struct:
    """Layout of the tensor maps and of those addresses that are present, after `before`; the others are packed as 0."""
    return struct.Struct(f"<{before}{_MAPS}{''.join('Q' if here else '8x' for here in present)}")


def pack(constants: Constants, order: bytes, shares: bytes) -> bytes:
    """All of the parameter, with maps and addresses left open."""
    return addresses([False] * len(ADDRESSES)).pack(b"") + _CONSTANTS.pack(*constants, order, shares).ljust(
        SIZE - 512 - 8 * len(ADDRESSES), b"\0"
    )
