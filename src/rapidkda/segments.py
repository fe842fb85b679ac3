"""The segment table: which tokens of a step belong to which request.

Every request's tokens are contiguous on the step's token axis, in the engine's own order, so a request is a segment
(first_token, length). Kernels read the table and need neither gathers nor packed copies. The table lives on the
device; where the host knows it too, `host` carries the same values, so that nothing is ever copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import checks


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Segments of a token axis. Built once a step, checked when built, shared by all layers.

    Attributes:
        first_token: int32 [N] on the device, the first token of each segment.
        length: int32 [N] on the device, tokens in each segment; 0 is legal.
        max_length: host-side upper bound of `length` (sizes launches; exact when `host` is given).
        host: the same (first_token, length) as int64 numpy arrays, or None when only the device knows. Kept as
            read-only copies: what is decided from them holds as long as the table lives.
        count: N.
        extent: tokens that the token axis must have at least (0 when only the device knows).
        total: tokens in all segments together, or -1 when only the device knows.
        kind: everything above but the addresses and values on the device, hashable. Lengths take part by value, first
            tokens by `extent` alone.
    """

    first_token: Tensor
    length: Tensor
    max_length: int
    host: tuple[np.ndarray, np.ndarray] | None = None
    count: int = field(init=False)
    extent: int = field(init=False, default=0)
    total: int = field(init=False, default=-1)
    kind: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("first_token", "length"):
            value = checks.tensor(f"segments.{name}", getattr(self, name))
            checks.dtype(f"segments.{name}", value, (torch.int32,))
            if value.ndim != 1 or value.shape != self.length.shape:
                raise ValueError(f"segments.{name} must have shape [N] like length, got {list(value.shape)}")
            checks.same_device(f"segments.{name}", value, self.length.device)
        checks.integer("segments.max_length", self.max_length, 0)
        object.__setattr__(self, "count", self.length.shape[0])
        lengths = None
        if self.host is not None:
            first, length = map(_frozen, self.host)
            object.__setattr__(self, "host", (first, length))
            if first.shape != length.shape or len(length) != self.count:
                raise ValueError(
                    f"segments.host must hold the first token and the length of {self.count} segments, "
                    f"got shapes {list(first.shape)} and {list(length.shape)}"
                )
            check_values("segments", first, length)
            if length.max(initial=0) > self.max_length:
                raise ValueError(
                    f"segments.max_length must bound every length, {length.max()} too, got {self.max_length}"
                )
            object.__setattr__(self, "extent", int((first + length).max(initial=0)))
            object.__setattr__(self, "total", int(length.sum()))
            lengths = length.tobytes()
        strides = self.first_token.stride(0), self.length.stride(0)
        kind = (self.length.device, self.count, self.max_length, self.extent, self.total, strides, lengths)
        object.__setattr__(self, "kind", kind)

    @staticmethod
    def from_lengths(
        lengths: Sequence[int], device: torch.device | str = "cpu", first_token: Sequence[int] | None = None
    ) -> Segments:
        """Build from host values. Without `first_token` the segments are packed one after another."""
        length = _host_array("lengths", lengths)
        if first_token is None:
            first = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)[:-1]]) if len(length) else length
        else:
            first = _host_array("first_token", first_token)
            if len(first) != len(length):
                raise ValueError(f"first_token must have one entry a segment ({len(length)}), got {len(first)}")
        both = torch.from_numpy(np.stack([first, length]).astype(np.int32)).to(device)
        return Segments(both[0], both[1], int(length.max(initial=0)), (first, length))

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None, max_length: int = 0) -> Segments:
        """Build from cumulative lengths [N+1] (already validated) without a copy to the host.

        `cu_seqlens_cpu` is the same tensor on the host; without it `max_length` must bound every length.
        """
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
        host = None
        if cu_seqlens_cpu is not None:
            values = cu_seqlens_cpu.numpy().astype(np.int64)
            host = (values[:-1], values[1:] - values[:-1])
            max_length = int(host[1].max(initial=0))
        return Segments(starts.to(torch.int32), (ends - starts).to(torch.int32), max_length, host)

    @staticmethod
    def equal(count: int, length: int, device: torch.device | str = "cpu") -> Segments:
        """`count` segments of `length` tokens each, packed."""
        host = (np.arange(count, dtype=np.int64) * length, np.full(count, length, np.int64))
        first = torch.arange(count, dtype=torch.int32, device=device) * length
        return Segments(first, torch.full((count,), length, dtype=torch.int32, device=device), length, host)

    def host_values(self) -> tuple[np.ndarray, np.ndarray]:
        """(first_token, length) on the host; copies from the device only when `host` was not given."""
        if self.host is not None:
            return self.host
        return self.first_token.cpu().numpy().astype(np.int64), self.length.cpu().numpy().astype(np.int64)


def _frozen(values: np.ndarray) -> np.ndarray:
    copy = np.array(values)
    copy.flags.writeable = False
    return copy


def _host_array(name: str, values: Sequence[int]) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"{name} must be a flat sequence of ints, got {values!r}")
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must not be negative, got {int(array.min())}")
    return array.astype(np.int64)


def check_values(name: str, first: np.ndarray, length: np.ndarray, tokens: int | None = None) -> None:
    """No segment is negative, none reaches past `tokens`, and no two overlap."""
    ends = first + length
    outside = (first < 0) | (length < 0) | (False if tokens is None else ends > tokens)
    if outside.any():
        bad = int(np.argmax(outside))
        where = "start at 0 or later" if tokens is None else f"lie inside the {tokens} tokens of q (or x)"
        raise ValueError(
            f"{name} must {where}; segment {bad} is first_token {int(first[bad])}, length {int(length[bad])}"
        )
    order = np.argsort(first, kind="stable")
    order = order[length[order] > 0]
    clash = np.nonzero(ends[order][:-1] > first[order][1:])[0]
    if len(clash):
        a, b = int(order[clash[0]]), int(order[clash[0] + 1])
        raise ValueError(f"{name} must not overlap; segments {a} and {b} share token {int(first[b])}")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoints:
    """States to export while a segment runs (prefix-cache checkpoints), sorted by (segment, offset).

    Attributes:
        begin: int32 [N+1] on the device; the checkpoints of segment n are begin[n] .. begin[n+1]-1.
        offset: int32 [M] on the device, tokens from the start of the segment; the state after `offset` tokens.
        slot: int32 [M] on the device, row of the checkpoint pool that receives it.
        host: the same (begin, offset, slot) as int64 numpy arrays, or None when only the device knows. Kept as
            read-only copies.
        kind: everything but the addresses and values on the device, hashable; host values take part by value.
    """

    begin: Tensor
    offset: Tensor
    slot: Tensor
    host: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    kind: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        values = None
        if self.host is not None:
            begin, offset, slot = map(_frozen, self.host)
            object.__setattr__(self, "host", (begin, offset, slot))
            values = tuple([(part.shape, part.dtype.str, part.tobytes()) for part in (begin, offset, slot)])
        tables = tuple([(x.shape, x.stride(), x.dtype, x.device) for x in (self.begin, self.offset, self.slot)])
        object.__setattr__(self, "kind", (tables, values))

    @staticmethod
    def build(
        entries: Sequence[tuple[int, int, int]], num_segments: int, device: torch.device | str = "cpu"
    ) -> Checkpoints:
        """Build from (segment, offset in tokens, slot) records in any order."""
        table = np.asarray(sorted(entries)) if len(entries) else np.zeros((0, 3), np.int64)
        if table.ndim != 2 or table.shape[1] != 3 or table.dtype.kind not in "iu":
            raise TypeError(f"checkpoints must be (segment, offset, slot) records of ints, got {list(entries)!r}")
        if len(table) and (table[:, 0].min() < 0 or table[:, 0].max() >= num_segments):
            raise ValueError(f"checkpoints must name segments 0..{num_segments - 1}, got {table[:, 0].tolist()}")
        if len(table) and (table[:, 1].min() <= 0 or table[:, 2].min() < 0):
            raise ValueError("checkpoints must have a positive offset and a slot of at least 0")
        if len(np.unique(table[:, 2])) != len(table):
            raise ValueError(f"checkpoints must not share a slot, got slots {table[:, 2].tolist()}")
        begin = np.searchsorted(table[:, 0], np.arange(num_segments + 1))
        packed = np.concatenate([begin, table[:, 1], table[:, 2]]).astype(np.int32)
        begin_d, offset_d, slot_d = (
            torch.from_numpy(packed).to(device).split([num_segments + 1, len(table), len(table)])
        )
        host = (begin.astype(np.int64), *table[:, 1:].astype(np.int64).T)
        return Checkpoints(begin_d, offset_d, slot_d, host)

    def host_values(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(begin, offset, slot) on the host; copies from the device only when `host` was not given."""
        if self.host is not None:
            return self.host
        begin, offset, slot = (t.cpu().numpy().astype(np.int64) for t in (self.begin, self.offset, self.slot))
        return begin, offset, slot
