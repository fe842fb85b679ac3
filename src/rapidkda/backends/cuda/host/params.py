"""The one argument of the prefill kernels, packed as `struct Params` of csrc/params.cuh lies in memory.

Its fields are in two parts: addresses, which differ from call to call, and what calls of a kind share.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

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
    GATE_FLOAT = 1 << 13


class Addresses(NamedTuple):
    """The fields after the four tensor maps, in the order of the C struct; 0 where a tensor is absent."""

    beta: int
    A_log: int
    dt_bias: int
    out: int
    initial: int
    final: int
    checkpoint_pool: int
    first_token: int
    length: int
    read_slots: int
    write_slots: int
    has_initial: int
    checkpoint_begin: int
    checkpoint_offset: int
    checkpoint_slot: int
    transitions: int = 0
    starts: int = 0
    seams: int = 0
    ready: int = 0


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


_ADDRESSES = struct.Struct("<512s19Q")
_CONSTANTS = struct.Struct("<10q9iI3fi128s")


class Argument:
    """The argument of a launch in memory of its own, with the constants packed."""

    __slots__ = ("_buffer", "_pointer", "address")

    def __init__(self, constants: Constants, order: bytes):
        self._buffer = ctypes.create_string_buffer(SIZE)
        _CONSTANTS.pack_into(self._buffer, _ADDRESSES.size, *constants, order)
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._buffer))
        self.address = ctypes.addressof(self._pointer)  # of the array of one pointer that a launch takes

    def point(self, maps: bytes, addresses: Addresses) -> None:
        """Pack the tensor maps and the addresses."""
        _ADDRESSES.pack_into(self._buffer, 0, maps, *addresses)


class Arguments:
    """The arguments of calls of one kind. A launch copies its argument, so a few in turn serve any number of calls; one
    in use is never handed out again, whatever thread asks."""

    __slots__ = ("_constants", "_free", "_order")

    def __init__(self, constants: Constants, order: bytes):
        self._constants = constants
        self._order = order
        self._free: list[Argument] = []

    def take(self) -> Argument:
        """An argument that nobody uses."""
        try:
            return self._free.pop()
        except IndexError:
            return Argument(self._constants, self._order)

    def give_back(self, argument: Argument) -> None:
        """After the launches that used it."""
        self._free.append(argument)
