"""Intervals against published values and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rapidkda.evaluation.statistics import mean, paired_difference, share


def test_wilson_as_published() -> None:
    """Newcombe 1998, Statistics in Medicine 17:857, table I."""
    published = ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718))
    for hits, count, low, high in published:
        found = share([True] * hits + [False] * (count - hits))
        assert found.value == hits / count
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("both", "gained", "lost"), [(0.6, 0.1, 0.1), (0.9, 0.01, 0.03), (0.3, 0.25, 0.05)])
def test_paired_interval_covers_the_difference(both: float, gained: float, lost: float) -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(400):
        counts = rng.multinomial(120, [both, gained, lost, 1 - both - gained - lost])
        mine = np.repeat([True, True, False, False], counts)
        theirs = np.repeat([True, False, True, False], counts)
        found = paired_difference(mine.tolist(), theirs.tolist())
        covered += found.low <= gained - lost <= found.high
    assert covered / 400 >= 0.93


def test_the_same_answers_differ_by_nothing() -> None:
    answers = [True, False, True, True] * 30
    found = paired_difference(answers, answers)
    assert found.value == 0
    assert found.low < 0 < found.high
    with pytest.raises(ValueError, match="as many outcomes, 120, got 2"):
        paired_difference(answers, [True, False])


def test_bootstrap_covers_the_mean_of_a_correlated_series() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        blocks = rng.normal(size=60).repeat(32)  # neighbours go together
        found = mean(blocks + rng.normal(size=blocks.size))
        covered += found.low <= 0 <= found.high
    assert 0.88 <= covered / 200 <= 1.0


def test_what_is_not_finite_or_not_there() -> None:
    assert mean(np.array([0.1, math.nan])).value == math.inf
    assert math.isnan(mean(np.array([])).value)
    assert math.isnan(share([]).value)
