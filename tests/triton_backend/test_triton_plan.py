"""What a prefill runs: workspace sizes, and when sequences are cut."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from rapidkda.backends.triton import plan
from rapidkda.problem import Sizes
from rapidkda.segments import Segments

H200 = 132
BLOCKS = (2, 2)  # value and key rows of 128 in blocks of 64


def cut(lens: list[int], heads: int) -> plan.Cut:
    return plan.cut(Segments.from_lengths(lens), sum(lens), heads, BLOCKS, H200, plan.SM90)


def shares(lens: list[int], heads: int, costs: plan.Costs = plan.SM90) -> int:
    return plan.shares(Segments.from_lengths(lens), sum(lens), heads, BLOCKS[0], H200, costs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_workspace_serves_every_smaller_call(dtype: torch.dtype) -> None:
    sizes = [
        Sizes(tokens, segments, heads, value_heads, dtype=dtype)
        for tokens, segments, heads in itertools.product((0, 1, 1000, 20000), (1, 7, 64), (2, 16))
        for value_heads in (heads, 4 * heads)
    ]
    for small, large in itertools.product(sizes, sizes):
        fits = all(getattr(small, f) <= getattr(large, f) for f in ("tokens", "segments", "heads", "value_heads"))
        if fits and small.value_heads == large.value_heads:
            assert plan.workspace_bytes(small) <= plan.workspace_bytes(large)


@pytest.mark.parametrize(
    ("lens", "heads"), [([16384], 16), ([2048], 4), ([9000, 17, 0, 4000], 8), ([5] * 40, 64), ([8192] * 4, 64)]
)
def test_the_call_fits_the_planned_workspace(lens: list[int], heads: int) -> None:
    chosen = cut(lens, heads)
    record = plan.record_bytes(128, False)
    tiles = plan.max_tiles(sum(lens), len(lens))
    used = plan.Layout.of(tiles, chosen.parts, shares(lens, heads), len(lens), heads, 128, 128, record)
    assert used.total <= plan.workspace_bytes(Sizes(sum(lens), len(lens), heads, heads))
    assert tiles >= sum(-(-length // plan.CHUNK) for length in lens)


def test_few_long_sequences_are_cut_and_many_are_not() -> None:
    assert cut([16384], 16).parts > 1
    assert cut([65536], 4).parts > cut([65536], 16).parts
    assert cut([2048] * 8, 64) == plan.NO_CUT
    assert cut([64], 1) == plan.NO_CUT
    assert cut([], 16) == plan.NO_CUT


def test_programs_share_chains_where_they_are_some_more_than_run_at_once() -> None:
    assert shares([8192] * 4, 64) == 3 * H200 // 2
    assert shares([8192] * 4, 16) == 0  # each has a multiprocessor to itself
    assert shares([2048] * 8, 16) == 0  # two share one
    assert shares([1024] * 8, 64) == 0  # three turns: what it costs to begin with another chain counts
    assert shares([8192] * 4, 64, plan.PORTABLE) == 0  # not measured
    assert shares([1 << 26] * 4, 64) == 0  # the line would not fit 32 bits
    assert shares([3000] * 400, 64) <= plan.max_shares(400, 64)
    assert shares([], 16) == 0


def test_parts_are_bounded_and_cover_the_sequence() -> None:
    for length, heads in itertools.product((100, 1000, 10000, 100000), (1, 2, 12, 16, 96)):
        chosen = cut([length], heads)
        if chosen.parts:
            tiles = -(-length // plan.CHUNK)
            assert chosen.parts * heads <= plan.MAX_CARRIES
            assert chosen.part_tiles >= plan.MIN_PART_TILES
            assert (chosen.parts - 1) * chosen.part_tiles < tiles <= chosen.parts * chosen.part_tiles


def test_a_cut_is_taken_only_where_it_is_predicted_to_pay() -> None:
    for length, heads in itertools.product((512, 4096, 32768), (4, 16, 64)):
        chosen = cut([length], heads)
        tiles = np.array([-(-length // plan.CHUNK)])
        whole = plan.predicted_whole(tiles, heads, BLOCKS, H200, plan.SM90)
        if chosen.parts:
            assert (
                plan.predicted(tiles, np.array([chosen.parts]), chosen.first_eighths, heads, BLOCKS, H200, plan.SM90)
                < whole
            )


class Measured(NamedTuple):
    """Prefill without its preparation on an H200."""

    lens: tuple[int, ...]
    heads: int
    parts: int  # of a sequence
    first_eighths: int
    us: float


def measured() -> list[Measured]:
    """Times of the scan as it is, from the result file: the model is fitted to them."""
    path = Path(__file__).parents[2] / "benchmarks/results/h200/2026-11-30-triton-rows.jsonl"
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if "before_the_scan" in row]
    return [
        Measured(
            tuple(row["lens"]),
            row["heads"],
            row["parts"],
            row.get("first_eighths", 8),
            row["us"] - row["before_the_scan"],
        )
        for row in rows
    ]


MEASURED = measured()
WORKLOADS = sorted({(row.lens, row.heads) for row in MEASURED})


def test_the_cost_model_predicts_what_was_measured() -> None:
    assert len(MEASURED) > 100
    for row in MEASURED:
        tiles = -(-np.array(row.lens) // plan.CHUNK)
        if row.parts == 1:
            got = plan.predicted_whole(tiles, row.heads, BLOCKS, H200, plan.SM90)
        else:
            parts = np.full(len(row.lens), row.parts)
            got = plan.predicted(tiles, parts, row.first_eighths, row.heads, BLOCKS, H200, plan.SM90)
        assert got == pytest.approx(row.us, rel=0.12), row


@pytest.mark.parametrize(("lens", "heads"), WORKLOADS, ids=lambda value: str(value)[:24])
def test_the_cut_that_was_fastest_is_taken(lens: tuple[int, ...], heads: int) -> None:
    """Or none, where that was fastest; of cuts, one within 1 % of the fastest."""
    rows = [row for row in MEASURED if (row.lens, row.heads) == (lens, heads)]
    fastest = min(rows, key=lambda row: row.us)
    chosen = cut(list(lens), heads)
    if fastest.parts == 1:
        assert chosen == plan.NO_CUT
    else:
        taken = (chosen.parts // len(lens), chosen.first_eighths)
        assert min(row.us for row in rows if (row.parts, row.first_eighths) == taken) <= 1.01 * fastest.us
