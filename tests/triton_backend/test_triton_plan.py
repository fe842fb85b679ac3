"""What a prefill runs: workspace sizes, and when sequences are cut."""

from __future__ import annotations

import itertools

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


@pytest.mark.parametrize(("lens", "heads"), [([16384], 16), ([2048], 4), ([9000, 17, 0, 4000], 8), ([5] * 40, 64)])
def test_the_call_fits_the_planned_workspace(lens: list[int], heads: int) -> None:
    chosen = cut(lens, heads)
    record = plan.record_bytes(128, False)
    tiles = plan.max_tiles(sum(lens), len(lens))
    used = plan.Layout.of(tiles, chosen.parts, len(lens), heads, 128, 128, record)
    assert used.total <= plan.workspace_bytes(Sizes(sum(lens), len(lens), heads, heads))
    assert tiles >= sum(-(-length // plan.CHUNK) for length in lens)


def test_few_long_sequences_are_cut_and_many_are_not() -> None:
    assert cut([16384], 16).parts > 1
    assert cut([65536], 4).parts > cut([65536], 16).parts
    assert cut([2048] * 8, 64) == plan.NO_CUT
    assert cut([64], 1) == plan.NO_CUT
    assert cut([], 16) == plan.NO_CUT


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


RAGGED = [1300, 547, 2048, 963, 271, 3063]
# Prefill without its preparation on an H200: lengths, heads, parts a sequence, eighths of a first part, microseconds.
MEASURED = (
    ([8192] * 2, 16, 1, 8, 326),
    ([8192] * 2, 16, 3, 8, 269),
    ([8192] * 2, 16, 3, 10, 275),
    ([8192] * 2, 16, 3, 12, 280),
    ([8192] * 2, 16, 5, 8, 282),
    ([8192] * 2, 16, 5, 10, 280),
    ([8192] * 2, 16, 5, 12, 273),
    ([8192] * 2, 16, 5, 14, 275),
    ([8192] * 2, 16, 5, 16, 278),
    ([8192] * 2, 16, 7, 8, 282),
    ([8192] * 2, 16, 7, 10, 273),
    ([8192] * 2, 16, 7, 12, 265),
    ([8192] * 2, 16, 7, 14, 265),
    ([8192] * 2, 16, 7, 16, 266),
    ([8192] * 2, 16, 9, 12, 317),
    ([8192] * 2, 16, 9, 14, 317),
    ([8192] * 2, 16, 9, 16, 322),
    ([8192] * 2, 16, 11, 12, 326),
    ([16384], 32, 1, 8, 650),
    ([16384], 32, 3, 8, 522),
    ([16384], 32, 3, 10, 533),
    ([16384], 32, 3, 12, 540),
    ([16384], 32, 5, 8, 533),
    ([16384], 32, 5, 10, 523),
    ([16384], 32, 5, 12, 514),
    ([16384], 32, 5, 14, 521),
    ([16384], 32, 5, 16, 526),
    ([16384], 32, 7, 8, 519),
    ([16384], 32, 7, 10, 505),
    ([16384], 32, 7, 12, 486),
    ([16384], 32, 7, 14, 497),
    ([16384], 32, 7, 16, 505),
    ([16384], 32, 9, 12, 574),
    ([16384], 32, 9, 14, 583),
    ([16384], 32, 9, 16, 601),
    ([16384], 32, 11, 12, 565),
    ([16384], 16, 1, 8, 647),
    ([16384], 16, 5, 8, 325),
    ([16384], 16, 5, 10, 343),
    ([16384], 16, 5, 12, 360),
    ([16384], 16, 7, 8, 322),
    ([16384], 16, 7, 10, 335),
    ([16384], 16, 7, 12, 350),
    ([16384], 16, 9, 8, 313),
    ([16384], 16, 9, 10, 306),
    ([16384], 16, 9, 12, 302),
    ([16384], 16, 9, 14, 314),
    ([16384], 16, 9, 16, 333),
    ([16384], 16, 11, 12, 323),
    ([16384], 16, 13, 8, 318),
    ([16384], 16, 13, 10, 313),
    ([16384], 16, 13, 12, 309),
    ([16384], 16, 13, 14, 320),
    ([16384], 16, 13, 16, 329),
    ([16384], 8, 1, 8, 648),
    ([16384], 8, 7, 8, 245),
    ([16384], 8, 7, 10, 258),
    ([16384], 8, 7, 12, 273),
    ([16384], 8, 8, 8, 222),
    ([16384], 8, 8, 10, 236),
    ([16384], 8, 8, 12, 250),
    ([16384], 8, 9, 8, 205),
    ([16384], 8, 9, 10, 218),
    ([16384], 8, 9, 12, 231),
    ([16384], 8, 13, 8, 209),
    ([16384], 8, 13, 10, 217),
    ([16384], 8, 13, 12, 229),
    ([16384], 8, 17, 8, 223),
    ([16384], 8, 17, 10, 217),
    ([16384], 8, 17, 12, 226),
    ([2048], 16, 1, 8, 85),
    ([2048], 16, 3, 8, 69),
    ([2048], 16, 3, 10, 72),
    ([2048], 16, 3, 12, 73),
    ([2048], 16, 4, 8, 67),
    ([2048], 16, 4, 10, 69),
    ([2048], 16, 4, 12, 70),
    ([2048], 16, 5, 8, 61),
    ([2048], 16, 5, 10, 64),
    ([2048], 16, 5, 12, 65),
    ([2048], 16, 7, 8, 68),
    ([2048], 16, 7, 10, 70),
    ([2048], 16, 7, 12, 71),
    ([65536], 16, 5, 8, 1323),
    ([65536], 16, 5, 10, 1365),
    ([65536], 16, 5, 12, 1432),
    ([65536], 16, 9, 8, 1182),
    ([65536], 16, 9, 10, 1129),
    ([65536], 16, 9, 12, 1098),
    ([65536], 16, 9, 14, 1141),
    ([65536], 16, 9, 16, 1220),
    ([65536], 16, 11, 12, 1183),
    ([65536], 16, 13, 8, 1159),
    ([65536], 16, 13, 10, 1110),
    ([65536], 16, 13, 12, 1083),
    ([65536], 16, 13, 14, 1103),
    ([65536], 16, 13, 16, 1160),
    ([65536], 16, 17, 8, 1292),
    ([65536], 16, 17, 10, 1223),
    ([65536], 16, 17, 12, 1187),
    ([8192] * 4, 16, 1, 8, 330),
    ([8192] * 4, 16, 3, 10, 395),
    ([8192], 64, 1, 8, 332),
    ([8192], 64, 3, 10, 396),
    ([512], 64, 1, 8, 26),
    ([512], 64, 3, 10, 50),
    ([256] * 8, 16, 1, 8, 23),
    ([256] * 8, 16, 3, 10, 71),
    ([2048] * 8, 16, 1, 8, 127),
    ([2048] * 8, 16, 3, 10, 227),
    ([1024] * 8, 64, 1, 8, 242),
    (RAGGED, 64, 1, 8, 236),
    ([8192] * 4, 64, 1, 8, 992),
)


def test_the_cost_model_predicts_what_was_measured() -> None:
    for lens, heads, parts, eighths, measured in MEASURED:
        tiles = -(-np.array(lens) // plan.CHUNK)
        if parts == 1:
            got = plan.predicted_whole(tiles, heads, BLOCKS, H200, plan.SM90)
        else:
            got = plan.predicted(tiles, np.full(len(lens), parts), eighths, heads, BLOCKS, H200, plan.SM90)
        assert got == pytest.approx(measured, rel=0.12), (lens, heads, parts, eighths)


@pytest.mark.parametrize(
    ("lens", "heads"),
    [([16384], 8), ([16384], 16), ([16384], 32), ([8192] * 2, 16), ([2048], 16), ([65536], 16)],
)
def test_the_cut_that_was_fastest_is_taken(lens: list[int], heads: int) -> None:
    times = {(parts, eighths): us for measured, h, parts, eighths, us in MEASURED if measured == lens and h == heads}
    chosen = cut(lens, heads)
    assert times[chosen.parts // len(lens), chosen.first_eighths] <= 1.01 * min(times.values())


@pytest.mark.parametrize(
    ("lens", "heads"),
    [
        ([8192] * 4, 16),
        ([8192], 64),
        ([512], 64),
        ([256] * 8, 16),
        ([2048] * 8, 16),
        ([1024] * 8, 64),
        (RAGGED, 64),
        ([8192] * 4, 64),
    ],
)
def test_what_was_fastest_whole_stays_whole(lens: list[int], heads: int) -> None:
    assert cut(lens, heads) == plan.NO_CUT
