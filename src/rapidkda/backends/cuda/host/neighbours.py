"""The second parameter of the kernels that take on a convolution or a gated norm, packed as `struct Neighbours` of
csrc/neighbours.cuh lies in memory.

Its tensor maps and addresses come last, and the first parameter, which begins with its own, follows: what differs from
call to call lies in one piece.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ....problem import PrefillCall
from .tensor_map import tensor_map

SIZE = 704  # sizeof(Neighbours)
MAPS_AT = 128
_MAPS = "512s"
_CONSTANTS = struct.Struct("<7q3iIf")

# Where a call has the tensors whose addresses come after the maps, in the order of the C struct.
ADDRESSED = (
    "conv.x",
    "conv.weight",
    "conv.pool",
    "conv.checkpoint_pool",
    "conv.read_slots",
    "conv.accepted",
    "norm.weight",
)


class Flags:
    """Bits of `Neighbours.flags`."""

    CONV_READ_SLOTS_64 = 1 << 0
    CONV_ACCEPTED_64 = 1 << 1


def pack(call: PrefillCall) -> bytes:
    """What comes before the maps."""
    eps = 0.0 if call.norm is None else call.norm.eps
    conv = call.conv
    if conv is None:
        return _CONSTANTS.pack(*[0] * 11, eps).ljust(MAPS_AT, b"\0")
    pool, exported = conv.pool, conv.checkpoint_pool
    entry, channel = (1, 2) if conv.channels_last else (2, 1)
    inner = pool if exported is None else exported
    flags = {
        Flags.CONV_READ_SLOTS_64: conv.read_slots is not None and conv.read_slots.dtype is torch.int64,
        Flags.CONV_ACCEPTED_64: conv.accepted is not None and conv.accepted.dtype is torch.int64,
    }
    return _CONSTANTS.pack(
        conv.x.stride(0),
        0 if pool is None else pool.stride(0),
        0 if inner is None else inner.stride(entry),
        0 if inner is None else inner.stride(channel),
        0 if exported is None else exported.stride(0),
        0 if conv.read_slots is None else conv.read_slots.stride(0),
        0 if conv.accepted is None else conv.accepted.stride(0),
        0 if pool is None else pool.shape[0],
        0 if exported is None else exported.shape[0],
        0 if pool is None else pool.shape[entry] - conv.weight.shape[1] + 2,
        sum(bit for bit, on in flags.items() if on),
        eps,
    ).ljust(MAPS_AT, b"\0")


def maps(call: PrefillCall, keep: list[Tensor]) -> bytes:
    """The four tensor maps; what a kernel does not read stays 0."""
    tokens = call.tokens
    if tokens.count == 0:
        return b""
    before = [b""] if call.conv is None else [tensor_map(x, 2, keep, 3) for x in (tokens.q, tokens.k, tokens.v)]
    return b"".join(before).ljust(384, b"\0") + (b"" if call.norm is None else tensor_map(call.norm.z, 2, keep))


def layout(present: Sequence[bool]) -> str:
    """Of the maps, of those addresses that are present, and of what is left before the first parameter."""
    left = SIZE - MAPS_AT - 512 - 8 * len(present)
    return f"{_MAPS}{''.join('Q' if here else '8x' for here in present)}{left}x"
