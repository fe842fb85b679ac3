"""The one argument of the prefill kernels, packed as `struct Params` of csrc/params.cuh lies in memory."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, fields

ORDER_ENTRIES = 64
SIZE = 960  # sizeof(Params): its alignment is that of a tensor map, 64


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


@dataclass(slots=True)
class Params:
    """Fields in the order of the C struct, after the four tensor maps and before the launch order."""

    beta: int = 0
    A_log: int = 0
    dt_bias: int = 0
    out: int = 0
    initial: int = 0
    final: int = 0
    checkpoint_pool: int = 0
    first_token: int = 0
    length: int = 0
    read_slots: int = 0
    write_slots: int = 0
    has_initial: int = 0
    checkpoint_begin: int = 0
    checkpoint_offset: int = 0
    checkpoint_slot: int = 0
    transitions: int = 0
    starts: int = 0
    beta_token_stride: int = 0
    beta_head_stride: int = 0
    out_token_stride: int = 0
    out_head_stride: int = 0
    initial_stride: int = 0
    final_stride: int = 0
    checkpoint_stride: int = 0
    read_stride: int = 0
    write_stride: int = 0
    has_initial_stride: int = 0
    tokens: int = 0
    segments: int = 0
    value_heads: int = 0
    group: int = 1
    initial_rows: int = 0
    final_rows: int = 0
    checkpoint_rows: int = 0
    pad_slot: int = 0
    parts: int = 1
    flags: int = 0
    scale: float = 1.0
    beta_scale: float = 1.0
    lower_bound: float = 0.0
    reserved: int = 0


_NAMES = tuple(field.name for field in fields(Params))
_LAYOUT = struct.Struct("<512s17Q10q9iI3fi128s")


class Argument:
    """Packed parameters in the form that a launch takes; alive until the launch returns."""

    __slots__ = ("_buffer", "_pointer", "address")

    def __init__(self, maps: bytes, params: Params, order: bytes = b""):
        self._buffer = ctypes.create_string_buffer(SIZE)
        _LAYOUT.pack_into(self._buffer, 0, maps, *(getattr(params, name) for name in _NAMES), order)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._buffer))
        self.address = ctypes.addressof(self._pointer)
