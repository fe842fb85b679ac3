"""The arguments that every kernel over the token axis takes, in one order."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...problem import GateKind, Tokens

GATE_CODES: dict[GateKind, int] = {"log_decay": 0, "bounded": 1, "softplus": 2}  # as in blocks.py


def inputs(tokens: Tokens) -> tuple[Tensor | None, ...]:
    """q, k, v, g, beta, A_log, dt_bias."""
    return (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta, tokens.gate.A_log, tokens.gate.dt_bias)


def scalars(tokens: Tokens) -> tuple[int, float, float, float]:
    """Value heads a key head, scale, beta_scale, lower_bound."""
    return (
        tokens.value_heads // tokens.heads,
        tokens.scale,
        tokens.beta_scale,
        tokens.gate.lower_bound if tokens.gate.lower_bound is not None else 0.0,
    )


def strides(tokens: Tokens) -> tuple[int, ...]:
    """Token and head strides of q, k, v, g, beta, in elements."""
    q, k, v, g, beta = tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta
    return (
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        g.stride(0), g.stride(1), beta.stride(0), beta.stride(1),
    )  # fmt: skip


def options(tokens: Tokens) -> dict[str, Any]:
    """Compile-time constants of a kind of call."""
    return {
        "K": tokens.key_dim,
        "V": tokens.value_dim,
        "GATE": GATE_CODES[tokens.gate.kind],
        "LOGITS": tokens.beta_logits,
        "L2NORM": tokens.l2norm,
    }
