"""Ground truth: the KDA recurrence in float64, one token at a time. It never dispatches to anything.

Source of the method: Kimi Linear (arXiv 2510.26692), section 3, with the gate variants of GLM-5.3-Flash and Kimi-K3.
Every backend is judged against this file and nothing else, so it is a plain loop with shapes in comments.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gate_log_decay(
    g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None
) -> Tensor:
    """Raw gate logits [..., HV, K] to log decays (<= 0), float64.

    bounded (lower_bound given): lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); A_log absent means amplitude 1
    unbounded:                   -exp(A_log) * softplus(g + dt_bias)
    """
    heads, dim = g.shape[-2:]
    x = g.double()
    if dt_bias is not None:
        x = x + dt_bias.double().reshape(heads, dim)
    amplitude = torch.ones(heads, 1, dtype=torch.float64, device=g.device)
    if A_log is not None:
        amplitude = A_log.double().reshape(heads, 1).exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(amplitude * x)
    return -amplitude * torch.nn.functional.softplus(x)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x * rsqrt(sum x^2 + eps) over the last dimension, float64."""
    x = x.double()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence: q, k, g [T, HV, K]; v [T, HV, V]; beta [T, HV]; state [HV, K, V]. Returns o [T, HV, V], state.

    S_t = (I - b_t k_t k_t^T) Diag(exp g_t) S_{t-1} + b_t k_t v_t^T        o_t = scale * S_t^T q_t
    """
    state = state.double()
    outputs = torch.empty(v.shape, dtype=torch.float64, device=v.device)
    for t in range(q.shape[0]):
        state = state * g[t].double().exp()[..., None]  # decay first                       [HV, K, V]
        read = torch.einsum("hkv,hk->hv", state, k[t].double())  # the delta rule reads the decayed state
        correction = beta[t].double()[:, None] * (v[t].double() - read)  # [HV, V]
        state = state + torch.einsum("hk,hv->hkv", k[t].double(), correction)  # then writes
        outputs[t] = scale * torch.einsum("hkv,hk->hv", state, q[t].double())  # the output reads the written state
    return outputs, state


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm: bool = False,
    use_gate: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """KDA with every variant of the operator, float64.

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K]; beta [B, T, HV]; with `cu_seqlens` [N+1], B is 1 and the
    sequences are packed along T. `initial_state` [N, HV, K, V], or [N, HV, V, K] with `state_v_first`.
    Returns o [B, T, HV, V] and the final state in the layout of `initial_state`, both float64.
    """
    batch, tokens, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    scale = key_dim**-0.5 if scale is None else scale
    if use_qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    if use_gate:
        g = gate_log_decay(g, A_log, dt_bias, lower_bound)
    beta = beta.double()
    if use_beta_sigmoid:
        beta = torch.sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)
    group = value_heads // heads  # value head j reads q/k head j // group
    q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)

    if cu_seqlens is None:
        spans = [(b, 0, tokens) for b in range(batch)]
    else:
        ends = cu_seqlens.tolist()
        spans = [(0, start, end) for start, end in zip(ends[:-1], ends[1:], strict=True)]
    outputs = torch.zeros(batch, tokens, value_heads, value_dim, dtype=torch.float64, device=v.device)
    states = torch.zeros(len(spans), value_heads, key_dim, value_dim, dtype=torch.float64, device=v.device)
    if initial_state is not None:
        states = initial_state.double().clone()
        states = states.transpose(-1, -2) if state_v_first else states
    for n, (b, start, end) in enumerate(spans):
        here = slice(start, end)
        outputs[b, here], states[n] = recurrence(
            q[b, here], k[b, here], v[b, here], g[b, here], beta[b, here], scale, states[n].clone()
        )
    return outputs, (states.transpose(-1, -2) if state_v_first else states).contiguous()


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, history: Tensor | None = None, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution of one sequence, float64.

    x [T, C]; weight [C, W]; history [W-1, C], the inputs before x, oldest first (zeros when absent).
    Returns y [T, C] and the new history.
    """
    width = weight.shape[1]
    if history is None:
        history = torch.zeros(width - 1, x.shape[1], dtype=torch.float64, device=x.device)
    padded = torch.cat([history.double(), x.double()])  # [W-1+T, C]
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for tap in range(width):
        y = y + padded[tap : tap + x.shape[0]] * weight[:, tap].double()
    if bias is not None:
        y = y + bias.double()
    return (torch.nn.functional.silu(y) if silu else y), padded[padded.shape[0] - (width - 1) :]


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str = "sigmoid") -> Tensor:
    """Per-head RMSNorm of x [T, H, D], times weight [D], times sigmoid(z) or silu(z), float64."""
    x, z = x.double(), z.double()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()
    return y * (torch.sigmoid(z) if activation == "sigmoid" else torch.nn.functional.silu(z))
