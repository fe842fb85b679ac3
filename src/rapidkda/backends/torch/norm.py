"""Gated RMSNorm per head: rms_norm(x) * weight * activation(z)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import NormCall
from .gates import accumulate_dtype, sigmoid, silu
from .spans import spans

BLOCK_ELEMENTS = 1 << 17  # of one temporary: few enough to stay in a cache


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """Out of place and differentiable, in the accumulation dtype; x, z [..., D], weight [D]."""
    dtype = accumulate_dtype(x.dtype)
    x, z = x.to(dtype), z.to(dtype)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
    return y * (sigmoid(z) if activation == "sigmoid" else silu(z))


def norm(call: NormCall) -> None:
    """`Backend.norm`, in blocks of tokens."""
    tokens, heads, dim = call.x.shape
    size = max(1, BLOCK_ELEMENTS // max(1, heads * dim))
    for first, last in [(0, tokens)] if call.segments is None else spans(*call.segments.host_values()):
        for start in range(first, last, size):
            here = slice(start, min(start + size, last))
            x = call.x[here]
            y = gated_norm(x, call.z[here], call.weight, call.eps, call.activation)
            call.out[here].copy_(y.masked_fill_((x == 0).all(-1, keepdim=True), 0.0))
