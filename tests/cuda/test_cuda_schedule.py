"""Who takes which head: everything once, and nobody much longer than the others."""

from __future__ import annotations

import numpy as np
import pytest

from rapidkda.backends.cuda.host.schedule import _SHARE, SHARES, shares
from rapidkda.testing import by_name


def taken(table: bytes, workers: int) -> list[list[tuple[int, int]]]:
    """(segment, head) of every worker, in turn."""
    work: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
    for segment, head, first, count, _ in _SHARE.iter_unpack(table):
        assert count > 0
        assert first + count <= workers
        for n in range(count):
            work[first + n].append((segment, head + n))
    return work


@pytest.mark.parametrize("workers", [132, 66, 40])
@pytest.mark.parametrize("lengths", [(2048, 17, 0, 1, 300), (5, 5, 5, 4), tuple(range(1, 2000, 119))])
def test_every_head_of_every_segment_is_taken_once(lengths: tuple[int, ...], workers: int) -> None:
    heads = 48
    work = taken(shares(np.array(lengths), heads, workers), workers)
    units = [unit for own in work for unit in own]
    assert sorted(units) == [(n, h) for n in range(len(lengths)) for h in range(heads)]
    assert all([lengths[n] for n, _ in own] == sorted((lengths[n] for n, _ in own), reverse=True) for own in work)


def test_all_end_at_about_the_same_time() -> None:
    shape = by_name("ragged_h64")
    loads = [sum(shape.seq_lens[n] for n, _ in own) for own in taken(shares(np.array(shape.seq_lens), 64, 132), 132)]
    assert max(loads) <= 1.04 * sum(shape.seq_lens) * 64 / 132


def test_where_there_is_nothing_to_gain_there_is_no_schedule() -> None:
    assert shares(np.array([300, 20]), 16, 132) == b""  # one head each
    assert shares(np.array([300] * 8), 64, 132) == b""  # equally long
    assert shares(np.arange(1, 400), 64, 132) == b""  # more entries than there is room for
    assert len(shares(np.arange(1, 20), 64, 132)) <= SHARES * _SHARE.size
