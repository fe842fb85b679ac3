"""What these tests share: small models of both families, how they are run, how results are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rapidkda.testing.models import build_glm5_next, build_kimi_linear

SIZES = {"hidden_size": 64, "vocab_size": 97, "layers": 4}
BUILDERS = {
    "glm5_next": lambda **kw: build_glm5_next(3, **{**SIZES, **kw}),
    "kimi_linear": lambda **kw: build_kimi_linear(3, **{**SIZES, **kw}),
}
FAMILIES = list(BUILDERS)
BAR = 1e-4  # largest logit difference over the largest logit, float32


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model: Any, ids: Tensor, mask: Tensor | None = None, cache: Any = None) -> tuple[Tensor, Any]:
    with torch.no_grad():
        out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return out.logits, out.past_key_values


def in_chunks(model: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> tuple[Tensor, Any]:
    """Logits of all tokens, fed a chunk at a time through one cache."""
    logits, cache, done = [], None, 0
    for size in sizes:
        seen = None if mask is None else mask[:, : done + size]
        part, cache = run(model, ids[:, done : done + size], seen, cache)
        logits.append(part)
        done += size
    assert done == ids.shape[1]
    return torch.cat(logits, dim=1), cache


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def cache_error(got: Any, want: Any) -> float:
    """The largest relative error of any KDA layer's states; both caches have seen the same tokens."""
    worst, layers = 0.0, 0
    for ours, theirs in zip(got.layers, want.layers, strict=True):
        if hasattr(ours, "recurrent_states"):
            layers += 1
            worst = max(worst, error(ours.recurrent_states[0], theirs.recurrent_states[0]))
            worst = max(worst, error(ours.conv_states[0], theirs.conv_states[0]))
            assert ours.recurrent_states[0].dtype == torch.float32
    assert layers == 3
    return worst


def kda_layer(model: Any) -> Any:
    return next(module for module in model.modules() if hasattr(module, "forget_gate"))
