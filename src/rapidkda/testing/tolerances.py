"""Accuracy bars and the error they bound. Written once; a test never widens them.

The error is the relative Frobenius error against the float64 reference, taken for each sequence and each head; the
worst one counts, because a mean over heads hides a fault in one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bar:
    """Largest relative error allowed of the outputs and of the final states."""

    out: float
    state: float


_HALF = {"fast": Bar(5.0e-3, 4.0e-3), "slow": Bar(5.5e-3, 4.5e-3), "collinear": Bar(8.0e-3, 8.0e-3)}
_FLOAT32 = {"fast": Bar(2e-6, 2e-6), "slow": Bar(2e-6, 2e-6), "collinear": Bar(1e-5, 1e-5)}
# Which measured bar a regime answers to: with one slow channel in two, keys that carry mass, or the gates of a trained
# model, memory is long.
_ANSWERS_TO = {"mixed": "slow", "unbounded": "fast", "staggered": "collinear", "captured": "slow"}

# Constructed cases (one-hot probes, one-token sequences, extreme gates) have few terms to average rounding over.
_CASE_HALF = Bar(1e-2, 5e-3)
_CASE_FLOAT32 = Bar(1e-5, 1e-5)
BF16_STATE_ROUNDING = 2.0**-8  # one rounding of a stored bfloat16 state, relative


def bar(regime: str, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> Bar:
    """The bar for a regime with q, k, v in `dtype` and states stored as `state_dtype`."""
    table = _FLOAT32 if dtype == torch.float32 else _HALF
    return _stored(table[_ANSWERS_TO.get(regime, regime)], state_dtype)


def case_bar(dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> Bar:
    """The bar for constructed cases."""
    return _stored(_CASE_FLOAT32 if dtype == torch.float32 else _CASE_HALF, state_dtype)


def carried_bar(dtype: torch.dtype, state_dtype: torch.dtype) -> Bar:
    """The bar for constructed cases whose state was stored and read back a few times on the way."""
    limit = case_bar(dtype, state_dtype)
    if state_dtype == torch.float32:
        return limit
    return Bar(max(limit.out, 2 * BF16_STATE_ROUNDING), max(limit.state, 2 * BF16_STATE_ROUNDING))


def _stored(limit: Bar, state_dtype: torch.dtype) -> Bar:
    if state_dtype == torch.float32:
        return limit
    return Bar(limit.out, max(limit.state, BF16_STATE_ROUNDING))


def relative_error(got: Tensor, want: Tensor) -> float:
    """norm(got - want) / norm(want) over all elements; infinite when anything is not finite or has no counterpart."""
    got = got.detach().double().to(want.device)
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    if not want.numel():
        return 0.0
    difference, size = float((got - want).norm()), float(want.norm())
    return difference / size if size else (0.0 if difference == 0.0 else float("inf"))


def worst_state_error(got: Tensor, want: Tensor) -> float:
    """Worst error of states [N, HV, ...] over sequences and heads."""
    if got.shape != want.shape:
        return float("inf")
    pairs = zip(got.flatten(0, 1), want.flatten(0, 1), strict=True)
    return max((relative_error(g, w) for g, w in pairs), default=0.0)


def worst_output_error(got: Tensor, want: Tensor, spans: list[tuple[int, int]]) -> float:
    """Worst error of outputs [T, HV, V] over sequences, given as (first token, length), and heads."""
    if got.shape != want.shape:
        return float("inf")
    errors = (
        relative_error(got[first : first + length, head], want[first : first + length, head])
        for first, length in spans
        for head in range(want.shape[1])
    )
    return max(errors, default=0.0)
