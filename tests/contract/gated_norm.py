"""The gated norm after the recurrence."""

from __future__ import annotations

import torch

from rapidkda import Segments, reference
from rapidkda.testing import relative_error

from .cases import case
from .guards import all_zero, fail, same_bits, within
from .target import Target


@case("B85", activation=("sigmoid", "silu"), dim=(128, 64))
def norm_of_each_head(target: Target, activation: str, dim: int) -> None:
    """Heads of very different size are normalised one by one, then gated; x, z and out are strided slices."""
    x = target.normal(9, 3, dim)
    x[:, 1] *= 10
    wide = target.normal(9, 3 * 3 * dim, seed=1)
    z = wide[:, 3 * dim : 6 * dim].unflatten(1, (3, dim))
    weight = target.normal(dim, seed=2, dtype=torch.float32)
    out = torch.full((9, 3, 2 * dim), float("nan"), dtype=target.dtype, device=target.device)
    target.norm(x, z, weight, activation=activation, out=out[..., :dim])
    want = reference.gated_rms_norm(x.cpu(), z.cpu(), weight.cpu(), 1e-5, activation)
    for head in range(3):
        error = relative_error(out[:, head, :dim], want[:, head])
        within(f"head {head}", error, target.case_bar().out)
    if not bool(torch.isnan(out[..., dim:]).all()):
        raise AssertionError("memory beside the output slice was written")


@case("B85", eps=(1e-6, 1.0))
def epsilon_and_weight_dtype(target: Target, eps: float) -> None:
    """eps counts where x is small; a weight in another dtype is taken as it is."""
    x, z = 0.1 * target.normal(4, 2, 128), target.normal(4, 2, 128, seed=1)
    weight = target.normal(128, seed=2, dtype=torch.bfloat16)
    want = reference.gated_rms_norm(x.cpu(), z.cpu(), weight.cpu(), eps)
    within("out", relative_error(target.norm(x, z, weight, eps=eps), want), target.case_bar().out)


@case("B85")
def norm_of_some_rows(target: Target) -> None:
    """With segments, their rows alone; empty segments and neighbours of other requests."""
    x, z, weight = target.normal(40, 2, 128), target.normal(40, 2, 128, seed=1), target.normal(128, seed=2)
    segments = Segments.from_lengths([3, 0, 1, 20], target.device, [2, 5, 6, 9])
    out = torch.full_like(x, float("nan"))
    target.norm(x, z, weight, segments=segments, out=out)
    rows = [*range(2, 5), 6, *range(9, 29)]
    same_bits("rows of segments", out[rows], target.norm(x, z, weight)[rows])
    if not bool(torch.isnan(out[[row for row in range(40) if row not in rows]]).all()):
        raise AssertionError("rows of no segment were written")


@case("B85")
def norm_in_place(target: Target) -> None:
    """out may be x itself."""
    x, z, weight = target.normal(5, 2, 128), target.normal(5, 2, 128, seed=1), target.normal(128, seed=2)
    want = target.norm(x, z, weight)
    target.norm(x, z, weight, out=x)
    same_bits("out in the memory of x", x, want)


@case("B85", activation=("sigmoid", "silu"))
def norm_of_zero_rows(target: Target, activation: str) -> None:
    """Padding rows come as zeros and stay zeros, whatever their gates hold; other rows keep their NaNs."""
    x, z, weight = target.normal(8, 2, 128), target.normal(8, 2, 128, seed=1), target.normal(128, seed=2)
    want = target.norm(x, z, weight, activation=activation)
    x[2], x[5, 0], x[6, 1, 7] = 0.0, 0.0, float("nan")
    z[2], z[5, 0], z[3, 1, 9] = float("nan"), float("-inf"), float("nan")
    target.norm(x, z, weight, activation=activation, out=x)
    for rows in (x[2], x[5, 0]):
        all_zero("rows that were zero", rows)
    for row, head, column in ((6, 1, 7), (3, 1, 9)):
        if not bool(torch.isnan(x[row, head, column])):
            fail("a NaN of a row that is not zero was lost")
    same_bits("other rows", x[[0, 1, 4, 7]], want[[0, 1, 4, 7]])


@case("B85")
def no_rows(target: Target) -> None:
    """Zero tokens are legal."""
    x = target.normal(0, 2, 128)
    if target.norm(x, x, target.normal(128)).shape != x.shape:
        raise AssertionError("out must have the shape of x")
