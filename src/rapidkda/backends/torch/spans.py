"""The token ranges of a segment table."""

from __future__ import annotations

import numpy as np


def spans(first: np.ndarray, length: np.ndarray) -> list[tuple[int, int]]:
    """Token ranges that segments cover, in order, adjacent ones joined."""
    order = np.argsort(first, kind="stable")
    found: list[tuple[int, int]] = []
    for start, count in zip(first[order].tolist(), length[order].tolist(), strict=True):
        if count == 0:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], start + count)
        else:
            found.append((start, start + count))
    return found
