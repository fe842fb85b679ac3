"""What a model's KDA layers see on a text, for the benchmarks and checks that take captured operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..dispatch import load
from ..problem import Tokens
from ..segments import Segments
from .decay import record


def capture(
    model: Any, tokens: Sequence[int], *, skip: int = 0, layers: Sequence[int] | None = None, backend: str = "torch"
) -> tuple[dict[int, dict[str, Tensor]], float | None]:
    """Operands of the KDA layers while a text is prefilled, as `rapidkda.testing.captured.save` takes them.

    Args:
        model: as `rapidkda.engine.Engine` takes it.
        tokens: token ids of the text.
        skip: leading tokens that are left out; what they leave in the state is kept.
        layers: indices of decoder layers; None for all KDA layers.
        backend: that runs the model.

    Returns:
        By layer: q, k, v, g, beta of the tokens from `skip` on in bfloat16, A_log and dt_bias, and the state before
        them; and the gate's lower bound.

    Raises ValueError for a layer that is no KDA layer, or a skip that leaves no token.
    """
    if not 0 <= skip < len(tokens):
        raise ValueError(f"skip must be at least 0 and leave some of the {len(tokens)} tokens, got {skip}")
    seen = record(model, load(backend), [*tokens, 0])  # the last token of a text is not computed
    wanted = list(seen) if layers is None else list(layers)
    for layer in wanted:
        if layer not in seen:
            raise ValueError(f"layers must be KDA layers, {', '.join(map(str, seen))}, got {layer}")
    return {layer: _tensors(seen[layer], skip) for layer in wanted}, seen[wanted[0]].gate.lower_bound


def _tensors(tokens: Tokens, skip: int) -> dict[str, Tensor]:
    operands = {name: getattr(tokens, name) for name in ("q", "k", "v", "g", "beta")}
    found = {name: value[skip:].to(torch.bfloat16) for name, value in operands.items()}
    gate = tokens.gate
    if gate.A_log is not None:
        found["A_log"] = gate.A_log.float().flatten()
    if gate.dt_bias is not None:
        found["dt_bias"] = gate.dt_bias.float().view(tokens.value_heads, tokens.key_dim)
    return {**found, "state": _state(tokens, skip)}


def _state(tokens: Tokens, skip: int) -> Tensor:
    """[HV, V, K], float32, after the first `skip` tokens."""
    if skip == 0:
        return torch.zeros(tokens.value_heads, tokens.value_dim, tokens.key_dim)
    pool = torch.zeros(1, tokens.value_heads, tokens.value_dim, tokens.key_dim, device=tokens.q.device)
    gate = tokens.gate
    ops.prefill(
        *(x[:skip] for x in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)),
        A_log=gate.A_log,
        dt_bias=gate.dt_bias,
        lower_bound=gate.lower_bound,
        segments=Segments.from_lengths([skip], pool.device),
        state=pool,
        slots=torch.zeros(1, dtype=torch.int32, device=pool.device),
        backend="torch",
    )
    return pool[0]
