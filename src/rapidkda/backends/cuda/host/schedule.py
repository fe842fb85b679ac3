"""Which CTA (or cluster) takes which head of which segment, when there are more of these than CTAs."""

from __future__ import annotations

import heapq
import struct

import numpy as np
from numpy.typing import NDArray

SHARES = 96  # entries that the kernels' argument has room for
_SHARE = struct.Struct("<HHBBH")  # segment, first head, first worker, workers, nothing
_SWITCH = 3  # chunks that going from one head to the next costs


def shares(lengths: NDArray[np.int64], heads: int, workers: int) -> bytes:
    """The longest first, each to a worker with the least to do: `struct Share` of csrc/params.cuh, one after another.

    Workers with equally much to do lie side by side, so a segment's heads need few entries. Empty where it does not
    matter (one head each, or segments of one length) and where the entries do not suffice.

    Args:
        lengths: tokens of each segment.
        heads: value heads of each.
        workers: CTAs, or clusters.
    """
    if len(lengths) * heads <= workers or len(lengths) > 1 << 16 or int(lengths.min()) == int(lengths.max()):
        return b""
    entries: list[bytes] = []
    loads = [(0, 0, workers)]  # what they have to do, the first of them, and how many
    for segment in np.argsort(-lengths, kind="stable").tolist():
        head = 0
        while head < heads:
            load, first, count = heapq.heappop(loads)
            taken = min(count, heads - head)
            if len(entries) == SHARES:
                return b""
            entries.append(_SHARE.pack(segment, head, first, taken, 0))
            heapq.heappush(loads, (load + int(lengths[segment] + 15) // 16 + _SWITCH, first, taken))
            if taken < count:
                heapq.heappush(loads, (load, first + taken, count - taken))
            head += taken
    return b"".join(entries)
