"""The tables of a step, and the regions of the persistent buffers that they are written to.

A store owns one region of the staging buffer and the same region on the device. Tables are views of the device region:
exact ones for an eager step, full ones (made once) for a captured step, where the rows past the last request have
length 0 and name the padding marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..segments import Checkpoints, Segments
from .config import StateShape
from .plan import Row

ROW_COLUMNS = 7
VERIFY_COLUMNS = 3


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """The prefills or the decodes of a step: one state read and one written a request.

    Attributes:
        segments: tokens of each request.
        slots: int32 [N], written; both pools.
        read_slots: int32 [N], where the recurrent state is read.
        conv_read_slots: int32 [N], where the convolution history is read.
        has_initial_state: int32 [N], 0 for fresh requests.
        accepted: int32 [N], tokens accepted of a verify step just before, else 0.
        settles: some row has accepted > 0 (or may have, in a captured step).
        checkpoints: states to export, or None.
    """

    segments: Segments
    slots: Tensor
    read_slots: Tensor
    conv_read_slots: Tensor
    has_initial_state: Tensor
    accepted: Tensor
    settles: bool
    checkpoints: Checkpoints | None = None


@dataclass(frozen=True, slots=True, eq=False)
class VerifyTable:
    """The verifications of a step.

    Attributes:
        segments: 1 + k_n tokens of each request.
        slots: int32 [N, 1 + k_max] with slot per position (unused entries hold the padding marker), else [N].
        conv_slots: int32 [N], slot of the convolution history.
        accepted: int32 [N], tokens accepted of the verify step before, else 0.
    """

    segments: Segments
    slots: Tensor
    conv_slots: Tensor
    accepted: Tensor


class RowStore:
    """Columns [7, capacity] of prefills or decodes, then their checkpoints (begin [capacity + 1], offset, slot)."""

    def __init__(self, host: np.ndarray, device: Tensor, capacity: int, max_checkpoints: int):
        split = ROW_COLUMNS * capacity
        self.capacity = capacity
        self._columns = host[:split].reshape(ROW_COLUMNS, capacity)
        self._device_columns = device[:split].view(ROW_COLUMNS, capacity)
        ends = np.cumsum([split, capacity + 1, max_checkpoints, max_checkpoints])
        self._checkpoints = [host[a:b] for a, b in zip(ends[:-1], ends[1:])]
        self._device_checkpoints = [device[a:b] for a, b in zip(ends[:-1], ends[1:])]

    @staticmethod
    def size(capacity: int, max_checkpoints: int) -> int:
        """int32 entries of a region."""
        return ROW_COLUMNS * capacity + capacity + 1 + 2 * max_checkpoints

    def write(self, rows: Sequence[Row], pad_slot: int) -> None:
        """Write the rows and padding after them."""
        columns, n = self._columns, len(rows)
        columns[:, n:] = 0
        columns[2:5, n:] = pad_slot
        if rows:
            columns[:, :n] = np.asarray(
                [
                    (
                        row.first_token,
                        row.length,
                        row.slots[0],
                        row.read_slot,
                        row.conv_read_slot,
                        row.has_initial_state,
                        row.accepted,
                    )
                    for row in rows
                ],
                dtype=np.int32,
            ).T
        begin, offset, slot = self._checkpoints
        exports = [sorted(row.checkpoints) for row in rows]
        begin[0] = 0
        begin[1 : n + 1] = np.cumsum([len(export) for export in exports])
        begin[n + 1 :] = begin[n]
        flat = [pair for export in exports for pair in export]
        if flat:
            offset[: len(flat)], slot[: len(flat)] = np.asarray(flat, dtype=np.int32).T

    def table(self, rows: Sequence[Row]) -> RowTable | None:
        """The exact table of the rows last written."""
        n = len(rows)
        if n == 0:
            return None
        host = self._columns[:2, :n].astype(np.int64)
        exported = int(self._checkpoints[0][n])
        checkpoints = None
        if exported:
            begin, offset, slot = self._device_checkpoints
            values = [part[:m].astype(np.int64) for part, m in zip(self._checkpoints, (n + 1, exported, exported))]
            checkpoints = Checkpoints(
                begin[: n + 1], offset[:exported], slot[:exported], (values[0], values[1], values[2])
            )
        return self._build(
            Segments(self._device_columns[0, :n], self._device_columns[1, :n], int(host[1].max()), (host[0], host[1])),
            n,
            any(row.accepted for row in rows),
            checkpoints,
        )

    def fixed(self, max_length: int, settles: bool) -> RowTable | None:
        """The full table, whose values only the device knows."""
        if self.capacity == 0:
            return None
        begin, offset, slot = self._device_checkpoints
        segments = Segments(self._device_columns[0], self._device_columns[1], max_length)
        checkpoints = Checkpoints(begin, offset, slot) if len(offset) else None
        return self._build(segments, self.capacity, settles, checkpoints)

    def _build(self, segments: Segments, n: int, settles: bool, checkpoints: Checkpoints | None) -> RowTable:
        slots, read_slots, conv_read_slots, has_initial_state, accepted = self._device_columns[2:, :n]
        return RowTable(segments, slots, read_slots, conv_read_slots, has_initial_state, accepted, settles, checkpoints)


class VerifyStore:
    """Columns [3, capacity], then slots [capacity, width]."""

    def __init__(self, host: np.ndarray, device: Tensor, capacity: int, shape: StateShape):
        split = VERIFY_COLUMNS * capacity
        self.capacity = capacity
        self.shape = shape
        width = shape.slots_per_request
        self._columns = host[:split].reshape(VERIFY_COLUMNS, capacity)
        self._slots = host[split:].reshape(capacity, width)
        self._device_columns = device[:split].view(VERIFY_COLUMNS, capacity)
        self._device_slots = device[split:].view(capacity, width)

    @staticmethod
    def size(capacity: int, width: int) -> int:
        """int32 entries of a region."""
        return (VERIFY_COLUMNS + width) * capacity

    def write(self, rows: Sequence[Row], pad_slot: int) -> None:
        """Write the rows and padding after them."""
        n = len(rows)
        self._columns[:, n:] = 0
        self._slots[:] = pad_slot
        for index, row in enumerate(rows):
            self._columns[:, index] = row.first_token, row.length, row.accepted
            self._slots[index, : len(row.slots)] = row.slots

    def table(self, rows: Sequence[Row]) -> VerifyTable | None:
        """The exact table of the rows last written."""
        n = len(rows)
        if n == 0:
            return None
        host = self._columns[:2, :n].astype(np.int64)
        first, length = self._device_columns[0, :n], self._device_columns[1, :n]
        return self._build(Segments(first, length, int(host[1].max()), (host[0], host[1])), n)

    def fixed(self) -> VerifyTable | None:
        """The full table, whose values only the device knows."""
        if self.capacity == 0 or self.shape.verify_tokens == 0:
            return None
        segments = Segments(self._device_columns[0], self._device_columns[1], self.shape.verify_tokens)
        return self._build(segments, self.capacity)

    def _build(self, segments: Segments, n: int) -> VerifyTable:
        slots, resting = self._device_slots[:n], self._device_slots[:n, 0]
        per_position = self.shape.rollback == "slots"
        return VerifyTable(segments, slots if per_position else resting, resting, self._device_columns[2, :n])
