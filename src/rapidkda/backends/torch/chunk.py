"""The chunked form of the KDA recurrence on chunks of 16 tokens.

Source of the method: Kimi Linear (arXiv 2510.26692), section 3, with two changes. Decays between two tokens are formed
by halving: the chunk is split into pairs of blocks of 8, 4, 2 and 1 tokens; a later token of a pair is decayed from the
start of its block, an earlier one to the end of its own. Each factor is an exponential of a sum of log decays, so it
is at most 1 whatever the gate is: nothing overflows, an underflow is one of the product itself, no sum is the
difference of two others, and no factor depends on a later token. And the unit-triangular system is solved by forward
substitution.

Shapes: M independent chunks (chunks times value heads), C = 16 tokens, key dim K, value dim V. With G the running sum
of log decays inside a chunk and S the state before it:

    L = strictly_lower(b_i <k_i exp(G_i), k_j exp(-G_j)>)      A = lower(<q_i exp(G_i), k_j exp(-G_j)>)
    T = (I + L)^-1 Diag(b)        Y = v - (k exp(G)) S         U = T Y
    O = (q exp(G)) S + A U        S' = Diag(exp(G_C)) S + (k exp(G_C - G))^T U
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...problem import CHECKPOINT_ALIGNMENT
from .scratch import Scratch

CHUNK = CHECKPOINT_ALIGNMENT  # so that every checkpoint lies between two chunks


@dataclass(slots=True, eq=False)
class Prepared:
    """What about M = R * HV chunks does not depend on the state. Keys and queries of a token are neighbours."""

    kq: Tensor  # [M, C * 2, K] k exp(G) | q exp(G)
    solve: Tensor  # [M, C * 2, C] T | A T
    v: Tensor  # [R, HV, C, V], any strides, any float dtype
    k_end: Tensor  # [M, C, K] k exp(G_C - G)
    decay: Tensor  # [M, K, 1] exp(G_C)

    def rows(self, begin: int, count: int) -> Prepared:
        """Rows begin .. begin + count - 1 of R, as views."""
        heads = self.v.shape[1]
        here = slice(begin * heads, (begin + count) * heads)
        return Prepared(
            self.kq[here], self.solve[here], self.v[begin : begin + count], self.k_end[here], self.decay[here]
        )


def prepare(kq: Tensor, v: Tensor, g: Tensor, b: Tensor, scratch: Scratch) -> Prepared:
    """Token-parallel part. kq [M, C, 2, K] (k, scaled q), v as in `Prepared`, log decay g [M, C, K], b [M, C].

    With a scratch that is on, kq and g are overwritten and the result lives in the scratch.
    """
    count, size, _, key_dim = kq.shape
    k = kq[:, :, 0]
    products, from_start, to_end = _products(kq, g, scratch)
    lower = products[:, :, 0] * b.unsqueeze(-1)
    inverse = torch.linalg.solve_triangular(lower, torch.diag_embed(b), upper=False, unitriangular=True)
    solve = torch.stack([inverse, torch.bmm(products[:, :, 1], inverse)], dim=2)
    if scratch.reuse:
        k_end, decay = to_end.exp_().mul_(k), from_start.exp_()
        kq.mul_(decay.unsqueeze(2))
    else:
        k_end, decay = k * to_end.exp(), from_start.exp()
        kq = kq * decay.unsqueeze(2)
    return Prepared(
        kq=kq.view(count, size * 2, key_dim),
        solve=solve.view(count, size * 2, size),
        v=v,
        k_end=k_end,
        decay=decay[:, -1].unsqueeze(-1),
    )


def _products(kq: Tensor, g: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
    """Decayed products of every later row with every earlier key, [M, i, (k, q), j], zero above the diagonal (and on
    it for k), and the sums of log decays over the chunk, up to each token and after it, both [M, C, K]."""
    count, chunk, _, key_dim = kq.shape
    k = kq[:, :, 0]
    products = scratch.buffer("products", count, chunk, 2, chunk).zero_()
    same = torch.mul(kq[:, :, 1], k, out=scratch.out("columns", count, chunk, key_dim))
    products[:, :, 1].diagonal(dim1=1, dim2=2).copy_(same.sum(-1))
    from_start, to_end = g, scratch.buffer("to_end", *g.shape).zero_()  # sums over a token's block: up to it, after it
    size = 1
    while size < chunk:
        pairs = chunk // (2 * size)
        half = (count, pairs, size, key_dim)
        start_pairs = from_start.view(count, pairs, 2, size, key_dim)
        end_pairs = to_end.view(count, pairs, 2, size, key_dim)
        fading = torch.exp(start_pairs[:, :, 1], out=scratch.out("fading", *half))
        rows = kq.view(count, pairs, 2, size, 2, key_dim)[:, :, 1]
        rows = torch.mul(rows, fading.unsqueeze(3), out=scratch.out("rows", count, pairs, size, 2, key_dim))
        columns = k.unflatten(1, (pairs, 2, size))[:, :, 0]
        if size > 1:
            fading = torch.exp(end_pairs[:, :, 0], out=scratch.out("fading", *half))
            columns = torch.mul(columns, fading, out=scratch.out("columns", *half))
        block = torch.bmm(
            rows.view(count * pairs, size * 2, key_dim), columns.reshape(count * pairs, size, key_dim).transpose(1, 2)
        )
        target = products.view(count, pairs, 2, size, 2, pairs, 2, size)[:, :, 1, :, :, :, 0]
        target.diagonal(dim1=1, dim2=4).copy_(block.view(count, pairs, size, 2, size).permute(0, 2, 3, 4, 1))
        from_start, to_end = _merge(start_pairs, end_pairs, scratch.reuse)
        size *= 2
    return products, from_start, to_end


def _merge(from_start: Tensor, to_end: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
    """Sums of log decays for blocks of twice the size: [M, pairs, 2, size, K] in, [M, C, K] out."""
    count, pairs, _, size, key_dim = from_start.shape
    shape = (count, pairs * 2 * size, key_dim)
    early, late = from_start[:, :, :, -1:].unbind(2)  # totals of the two blocks, [M, pairs, 1, K]
    if in_place:
        to_end[:, :, 0] += late
        from_start[:, :, 1] += early
        return from_start.view(shape), to_end.view(shape)
    from_start = torch.stack([from_start[:, :, 0], from_start[:, :, 1] + early], dim=2)
    to_end = torch.stack([to_end[:, :, 0] + late, to_end[:, :, 1]], dim=2)
    return from_start.view(shape), to_end.view(shape)


def advance(chunk: Prepared, state: Tensor, out: Tensor | None, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """One sequential step from `state` [M, K, V]: outputs [R, HV, C, V] and the state after the chunk.

    With a scratch that is on, the outputs go to `out` and the state is updated in place.
    """
    rows, heads, tokens, value_dim = chunk.v.shape
    double = (rows * heads, tokens * 2, value_dim)
    read = torch.bmm(chunk.kq, state, out=scratch.out("read", *double)).view(rows, heads, tokens, 2, value_dim)
    missing = scratch.out("missing", rows, heads, tokens, value_dim)
    missing = torch.sub(chunk.v, read[:, :, :, 0], out=missing).flatten(0, 1)  # v is strided, the product needs it dense
    solved = torch.bmm(chunk.solve, missing, out=scratch.out("solved", *double))
    solved = solved.view(rows, heads, tokens, 2, value_dim)
    out = torch.add(read[:, :, :, 1], solved[:, :, :, 1], out=out)
    correction, k_end = solved[:, :, :, 0].flatten(0, 1), chunk.k_end.transpose(1, 2)
    if scratch.reuse:
        return out, state.mul_(chunk.decay).baddbmm_(k_end, correction)
    return out, torch.baddbmm(state * chunk.decay, k_end, correction)
