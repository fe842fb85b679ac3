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

CHUNK = CHECKPOINT_ALIGNMENT  # so that every checkpoint lies between two chunks


@dataclass(slots=True, eq=False)
class Prepared:
    """Everything about chunks that does not depend on the state. Keys and queries of a token are neighbours."""

    kq: Tensor  # [M, C * 2, K] k exp(G) | q exp(G)
    solve: Tensor  # [M, C * 2, C] T | A T
    v: Tensor  # [M, C, V]
    k_end: Tensor  # [M, C, K] k exp(G_C - G)
    decay: Tensor  # [M, K, 1] exp(G_C)

    def narrow(self, begin: int, count: int) -> Prepared:
        """Chunks begin .. begin + count - 1, as views."""
        here = slice(begin, begin + count)
        return Prepared(self.kq[here], self.solve[here], self.v[here], self.k_end[here], self.decay[here])


def prepare(kq: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Prepared:
    """Token-parallel part. kq [M, C, 2, K] (k, scaled q), v [M, C, V], log decay g [M, C, K], b [M, C]."""
    count, chunk, _, key_dim = kq.shape
    k = kq[:, :, 0]
    products = torch.zeros(count, chunk, 2, chunk, dtype=kq.dtype, device=kq.device)  # [M, i, (k, q), j]
    products[:, :, 1].diagonal(dim1=1, dim2=2).copy_((kq[:, :, 1] * k).sum(-1))
    from_start, to_end = g, torch.zeros_like(g)  # sums over a token's block: up to it, and after it
    size = 1
    while size < chunk:
        pairs = chunk // (2 * size)
        split = (count, pairs, 2, size, key_dim)
        (_, late), (early, _) = from_start.view(split).unbind(2), to_end.view(split).unbind(2)
        rows = kq.view(count, pairs, 2, size, 2, key_dim)[:, :, 1] * late.exp().unsqueeze(3)
        columns = k.unflatten(1, (pairs, 2, size))[:, :, 0] * early.exp()
        block = torch.bmm(
            rows.view(count * pairs, size * 2, key_dim), columns.view(count * pairs, size, key_dim).transpose(1, 2)
        )
        target = products.view(count, pairs, 2, size, 2, pairs, 2, size)[:, :, 1, :, :, :, 0]
        target.diagonal(dim1=1, dim2=4).copy_(block.view(count, pairs, size, 2, size).permute(0, 2, 3, 4, 1))
        from_start, to_end = _merge(from_start.view(split), to_end.view(split))
        size *= 2
    decayed = kq * from_start.exp().unsqueeze(2)
    lower = products[:, :, 0] * b.unsqueeze(-1)
    inverse = torch.linalg.solve_triangular(lower, torch.diag_embed(b), upper=False, unitriangular=True)
    return Prepared(
        kq=decayed.view(count, chunk * 2, key_dim),
        solve=torch.stack([inverse, torch.bmm(products[:, :, 1], inverse)], dim=2).view(count, chunk * 2, chunk),
        v=v,
        k_end=k * to_end.exp(),
        decay=from_start[:, -1].exp().unsqueeze(-1),
    )


def _merge(from_start: Tensor, to_end: Tensor) -> tuple[Tensor, Tensor]:
    """Block sums of log decays for blocks of twice the size; both [M, pairs, 2, size, K] in, [M, C, K] out."""
    count, pairs, _, size, key_dim = from_start.shape
    totals = from_start[:, :, :, -1:]  # [M, pairs, 2, 1, K]
    zero = torch.zeros_like(totals[:, :, :1])
    before = torch.cat([zero, totals[:, :, :1]], dim=2)
    after = torch.cat([totals[:, :, 1:], zero], dim=2)
    shape = (count, pairs * 2 * size, key_dim)
    return (from_start + before).view(shape), (to_end + after).view(shape)


def advance(chunk: Prepared, state: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
    """One sequential step: outputs [M, C, V] and the state [M, K, V] after the chunk, in place if asked."""
    count, tokens, value_dim = chunk.v.shape
    read = torch.bmm(chunk.kq, state).view(count, tokens, 2, value_dim)
    solved = torch.bmm(chunk.solve, chunk.v - read[:, :, 0]).view(count, tokens, 2, value_dim)
    out = read[:, :, 1] + solved[:, :, 1]
    correction, k_end = solved[:, :, 0], chunk.k_end.transpose(1, 2)
    if in_place:
        return out, state.mul_(chunk.decay).baddbmm_(k_end, correction)
    return out, torch.baddbmm(state * chunk.decay, k_end, correction)
