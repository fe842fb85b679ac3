"""Which CTA (or cluster) takes which head of which segment, when there are more of these than CTAs."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

SHARES = 96  # entries that the kernels' argument has room for
_SHARE = struct.Struct("<HHBBH")  # segment, first head, first worker, workers, nothing
_SWITCH = 3  # chunks that going from one head to the next costs
# Most load, in parts of the mean, and whether heads are stacked; tried in turn.
_TRIED = ((1.015, True), (1.03, True), (1.03, False), (1.06, True), (1.06, False), (1.1, False))


def shares(lengths: NDArray[np.int64], heads: int, workers: int) -> bytes:
    """The longest first, into as few workers as finish in time; `struct Share` of csrc/params.cuh, one after another.

    Workers with equally much to do lie side by side, so a segment's heads need few entries. Empty where it does not
    matter (one head each, or segments of one length) and where the entries do not suffice.

    Args:
        lengths: tokens of each segment.
        heads: value heads of each.
        workers: CTAs, or clusters.
    """
    if len(lengths) * heads <= workers or len(lengths) > 1 << 16 or int(lengths.min()) == int(lengths.max()):
        return b""
    order = np.argsort(-lengths, kind="stable").tolist()
    loads = [int(lengths[segment] + 15) // 16 + _SWITCH for segment in order]
    mean = sum(loads) * heads / workers
    for slack, stacked in _TRIED:
        table = _deal(order, loads, heads, workers, slack * mean, stacked)
        if table is not None:
            return table
    return _deal(order, loads, heads, workers) or b""


def _deal(
    order: list[int], loads: list[int], heads: int, workers: int, most: float | None = None, stacked: bool = False
) -> bytes | None:
    """Deal heads in this order to the most loaded workers that stay within `most`, one each, or, stacked, as many as
    fit; without `most` one each to the least loaded ones. None where that, or the room for entries, does not suffice.
    """
    entries: list[bytes] = []
    groups = [(0, 0, workers)]  # what each of them has to do, the first, and how many
    for segment, load in zip(order, loads):
        head = 0
        while head < heads:
            fitting = [min(groups)] if most is None else [group for group in groups if group[0] + load <= most]
            if not fitting:
                return None
            group = max(fitting)
            groups.remove(group)
            before, first, count = group
            each = int((most - before) // load) if stacked and most is not None else 1
            used = min(count, -(-(heads - head) // each))
            if used < count:
                groups.append((before, first + used, count - used))
            while used and each and head < heads:  # one more to each of them
                taken = min(used, heads - head)
                if len(entries) == SHARES:
                    return None
                entries.append(_SHARE.pack(segment, head, first, taken, 0))
                head, before, each = head + taken, before + load, each - 1
                if taken < used:
                    groups.append((before - load, first + taken, used - taken))
                    used = taken
            groups.append((before, first, used))
    return b"".join(entries)
