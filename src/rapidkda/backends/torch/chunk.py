"""The chunked form of the KDA recurrence on chunks of 16 tokens.

Source of the method: Kimi Linear (arXiv 2510.26692), section 3, with two changes. Decays between two tokens are formed
by halving: the chunk is split into pairs of blocks of 8, 4, 2 and 1 tokens; a later token of a pair is decayed from the
start of its block, an earlier one to the end of its own, and when blocks merge, each side is decayed through the other
one. Every factor is the exponential of a sum of log decays of one block, so it is at most 1 whatever the gate is:
nothing overflows, an underflow is one of the product itself, no sum is the difference of two others, and no factor
depends on a later token. And the unit-triangular system is solved by forward substitution.

Shapes: M independent chunks (chunks times value heads), C = 16 tokens, key dim K, value dim V. With G the running sum
of log decays inside a chunk and S the state before it:

    L = strictly_lower(b_i <k_i exp(G_i), k_j exp(-G_j)>)      A = lower(<q_i exp(G_i), k_j exp(-G_j)>)
    T = (I + L)^-1 Diag(b)        Y = v - (k exp(G)) S         U = T Y
    O = (q exp(G)) S + A U        S' = Diag(exp(G_C)) S + (k exp(G_C - G))^T U
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...problem import CHECKPOINT_ALIGNMENT
from .scratch import Scratch

CHUNK = CHECKPOINT_ALIGNMENT  # so that every checkpoint lies between two chunks


@dataclass(slots=True, eq=False)
class Step:
    """What the sequential part needs of M = R * HV chunks. Keys and queries of a token are neighbours."""

    kq: Tensor  # [M, C * 2, K] k exp(G) | q exp(G)
    solve: Tensor  # [M, C * 2, C] T | A T
    v: Tensor  # [R, HV, C, V], any strides, any float dtype
    k_end: Tensor  # [M, K, C] k exp(G_C - G)
    decay: Tensor  # [M, K, 1] exp(G_C)

    def split(self, rows: list[int]) -> Iterator[Step]:
        """Consecutive parts of R, as views."""
        heads = self.v.shape[1]
        counts = [n * heads for n in rows]
        parts = (self.kq.split(counts), self.solve.split(counts), self.v.split(rows))
        return map(Step, *parts, self.k_end.split(counts), self.decay.split(counts))


def prepare(kq: Tensor, v: Tensor, g: Tensor, b: Tensor, scratch: Scratch) -> Step:
    """Token-parallel part. kq [M, C, 2, K] (k, scaled q), v as in `Step`, log decay g [M, C, K], b [M, C].

    With a scratch that is on, kq is overwritten and the result lives in the scratch.
    """
    count, size, _, key_dim = kq.shape
    products, kq, k_end, decay = _products(kq, g, scratch)
    lower = products[:, :, 0] * b.unsqueeze(-1)
    inverse = torch.linalg.solve_triangular(lower, torch.diag_embed(b), upper=False, unitriangular=True)
    solve = torch.stack([inverse, torch.bmm(products[:, :, 1], inverse)], dim=2)
    return Step(
        kq=kq.view(count, size * 2, key_dim),
        solve=solve.view(count, size * 2, size),
        v=v,
        k_end=k_end.transpose(1, 2),
        decay=decay.view(count, key_dim, 1),
    )


def _products(kq: Tensor, g: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Decayed products of every later row with every earlier key, [M, i, (k, q), j], zero above the diagonal (and on
    it for k); k and q decayed from the start of the chunk, [M, C, 2, K]; k decayed to its end, [M, C, K]; and the
    decay of the whole chunk, [M, 1, K]."""
    count, chunk, _, key_dim = kq.shape
    products = scratch.buffer("products", count, chunk, 2, chunk).zero_()
    same = torch.mul(kq[:, :, 1], kq[:, :, 0], out=scratch.out("decay", count, chunk, key_dim))
    products[:, :, 1].diagonal(dim1=1, dim2=2).copy_(same.sum(-1))
    to_end = scratch.convert("k_end", kq[:, :, 0])
    total = g  # log decays of whole blocks, [M, blocks, K]
    decay = torch.exp(total, out=scratch.out("decay", *total.shape))
    from_start = kq.mul_(decay.unsqueeze(2)) if scratch.reuse else kq * decay.unsqueeze(2)
    size = 1
    while size < chunk:
        pairs = chunk // (2 * size)
        rows = from_start.view(count, pairs, 2, size, 2, key_dim)
        columns = to_end.reshape(count, pairs, 2, size, key_dim)
        block = torch.bmm(
            columns.flatten(0, 1)[:, 0], rows.flatten(0, 1)[:, 1].view(count * pairs, size * 2, key_dim).transpose(1, 2)
        )
        target = products.view(count, pairs, 2, size, 2, pairs, 2, size)[:, :, 1, :, :, :, 0]
        target.diagonal(dim1=1, dim2=4).copy_(block.view(count, pairs, size, size, 2).permute(0, 3, 4, 2, 1))
        early, late = decay.view(count, pairs, 2, 1, key_dim).unbind(2)
        early_total, late_total = total.view(count, pairs, 2, key_dim).unbind(2)
        if scratch.reuse:
            rows[:, :, 1] *= early.unsqueeze(3)
            columns[:, :, 0] *= late
        else:
            from_start = torch.stack([rows[:, :, 0], rows[:, :, 1] * early.unsqueeze(3)], dim=2)
            to_end = torch.stack([columns[:, :, 0] * late, columns[:, :, 1]], dim=2)
        total = early_total + late_total
        decay = total.exp()
        size *= 2
    return products, from_start, to_end.view(count, chunk, key_dim), decay


def advance(step: Step, state: Tensor) -> tuple[Tensor, Tensor]:
    """The sequential part: outputs [R, HV, C, V], and the state [M, K, V] after the chunks from that before them."""
    rows, heads, tokens, value_dim = step.v.shape
    read = torch.bmm(step.kq, state).view(rows, heads, tokens, 2, value_dim)
    missing = (step.v - read[:, :, :, 0]).flatten(0, 1)
    solved = torch.bmm(step.solve, missing).view(rows, heads, tokens, 2, value_dim)
    state = torch.baddbmm(state * step.decay, step.k_end, solved[:, :, :, 0].flatten(0, 1))
    return read[:, :, :, 1] + solved[:, :, :, 1], state


class Advance:
    """`advance` in place, for steps of one size: buffers and their views are made once."""

    def __init__(self, rows: int, heads: int, value_dim: int, scratch: Scratch):
        shape = (rows, heads, CHUNK, 2, value_dim)
        self.read = scratch.buffer("read", rows * heads, CHUNK * 2, value_dim)
        self.solved = scratch.buffer("solved", rows * heads, CHUNK * 2, value_dim)
        self.missing = scratch.buffer("missing", rows, heads, CHUNK, value_dim)
        self.missing_rows = self.missing.view(rows * heads, CHUNK, value_dim)
        self.read_k, self.read_q = self.read.view(shape).unbind(3)
        self.solved_k, self.solved_q = self.solved.view(shape).unbind(3)
        self.correction = self.solved_k.flatten(0, 1)

    def __call__(self, step: Step, state: Tensor, out: Tensor) -> None:
        torch.bmm(step.kq, state, out=self.read)
        torch.sub(step.v, self.read_k, out=self.missing)
        torch.bmm(step.solve, self.missing_rows, out=self.solved)
        torch.add(self.read_q, self.solved_q, out=out)
        state.mul_(step.decay).baddbmm_(step.k_end, self.correction)
