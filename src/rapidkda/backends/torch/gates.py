"""Activations of the raw inputs: the log decay, the write strength, and the L2 norm of queries and keys.

All of them take and return the accumulation dtype, are differentiable, and work on any leading shape.

torch's own sigmoid and softplus round differently in the last elements of a vector loop, so that an element's bits
depend on where in a tensor it lies. Without gradients both are therefore built from functions that do not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...problem import Gate

L2_EPS = 1e-6


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs (gradient checks), else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sigmoid(x: Tensor) -> Tensor:
    if x.requires_grad:
        return torch.sigmoid(x)
    return x.neg().exp_().add_(1.0).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    if x.requires_grad:
        return F.softplus(x)
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


def silu(x: Tensor) -> Tensor:
    if x.requires_grad:
        return F.silu(x)
    divisor = x.neg().exp_().add_(1.0)
    return torch.div(x, divisor, out=divisor)


def log_decay(gate: Gate, g: Tensor, in_place: bool = False) -> Tensor:
    """Log decay (<= 0) of gate inputs `g` [..., HV, C, K], in the dtype of `g`; may overwrite it if in_place."""
    if gate.kind == "log_decay":
        return g
    heads, key_dim = g.shape[-3], g.shape[-1]
    if gate.dt_bias is not None:
        bias = gate.dt_bias.to(g.dtype).reshape(heads, 1, key_dim)
        g = g.add_(bias) if in_place else g + bias
    amplitude = None
    if gate.A_log is not None:
        # exp(A_log) may overflow; an infinite amplitude would turn a zero logit into NaN.
        amplitude = gate.A_log.to(g.dtype).reshape(heads, 1, 1).exp().clamp(max=torch.finfo(g.dtype).max)
    if gate.kind == "softplus":
        decay = softplus(g)
        return decay.neg_() if amplitude is None else decay * -amplitude
    if gate.lower_bound is None:
        raise ValueError("gate.lower_bound must be given for a bounded gate, got None")
    if not in_place:
        return sigmoid(g if amplitude is None else g * amplitude) * gate.lower_bound
    g = g.neg_() if amplitude is None else g.mul_(-amplitude)
    return g.exp_().add_(1.0).reciprocal_().mul_(gate.lower_bound)


def write_strength(beta: Tensor, logits: bool, scale: float) -> Tensor:
    """Write strength b from `beta`, in its dtype; `scale` multiplies the sigmoid of logits."""
    if not logits:
        return beta
    strength = sigmoid(beta)
    return strength if scale == 1.0 else strength * scale


def inverse_norm(x: Tensor, scale: float = 1.0) -> Tensor:
    """scale * rsqrt(sum x^2 + 1e-6) over the last dimension of x [..., K], kept as 1."""
    inverse = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() + L2_EPS)
    return inverse if scale == 1.0 else inverse * scale


def normalize(x: Tensor, l2norm: bool, scale: float = 1.0) -> Tensor:
    """x [..., K], L2-normalised if asked, times `scale`."""
    if l2norm:
        return x * inverse_norm(x, scale)
    return x if scale == 1.0 else x * scale
