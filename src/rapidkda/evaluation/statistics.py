"""Intervals of confidence for shares, differences of paired shares, and means over a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959964  # two-sided 95 % of the normal distribution
RESAMPLES = 1000
BLOCK = 64  # tokens that a resample keeps together, as neighbours in a text are not independent
FEWEST = 8  # blocks


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval, and the number of observations behind it."""

    value: float
    low: float
    high: float
    count: int


def share(outcomes: Sequence[bool]) -> Estimate:
    """Share of true outcomes with Wilson's interval. NaN without outcomes."""
    count, hits = len(outcomes), sum(outcomes)
    if not count:
        return Estimate(math.nan, math.nan, math.nan, 0)
    value = hits / count
    centre = (value + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(value * (1 - value) / count + Z**2 / (4 * count**2))
    return Estimate(value, max(0.0, centre - half), min(1.0, centre + half), count)


def paired_difference(outcomes: Sequence[bool], reference: Sequence[bool]) -> Estimate:
    """Share of `outcomes` minus that of `reference`, on the same questions.

    The interval is Newcombe's for paired shares (1998, method 10): Wilson's of both, combined with their correlation.
    """
    if len(outcomes) != len(reference):
        raise ValueError(f"reference must have as many outcomes, {len(outcomes)}, got {len(reference)}")
    mine, theirs, count = share(outcomes), share(reference), len(outcomes)
    if not count:
        return mine
    pairs = list(zip(outcomes, reference))
    both, neither = sum(a and b for a, b in pairs), sum(not a and not b for a, b in pairs)
    gained, lost = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    product = (both + gained) * (neither + lost) * (both + lost) * (neither + gained)
    excess = float(both * neither - gained * lost)
    if excess > 0:
        excess = max(excess - count / 2, 0.0)
    correlation = excess / math.sqrt(product) if product else 0.0

    def root(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))

    value = (gained - lost) / count
    low = value - root(mine.value - mine.low, theirs.high - theirs.value)
    high = value + root(mine.high - mine.value, theirs.value - theirs.low)
    return Estimate(value, low, high, count)


def mean(values: np.ndarray) -> Estimate:
    """Mean of values [n] in the order of a text, with a percentile bootstrap over blocks of `BLOCK` of them or fewer.

    Anything that is not finite makes all of it infinite.
    """
    if not values.size:
        return Estimate(math.nan, math.nan, math.nan, 0)
    if not np.isfinite(values).all():
        return Estimate(math.inf, math.inf, math.inf, values.size)
    size = min(BLOCK, max(1, values.size // FEWEST))
    starts = np.arange(0, values.size, size)
    sums = np.add.reduceat(values, starts)
    sizes = np.minimum(size, values.size - starts)
    picks = np.random.default_rng(0).integers(0, len(starts), (RESAMPLES, len(starts)))
    low, high = np.percentile(sums[picks].sum(1) / sizes[picks].sum(1), [2.5, 97.5])
    return Estimate(float(values.mean()), float(low), float(high), values.size)
