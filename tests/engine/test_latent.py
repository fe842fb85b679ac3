"""Latent attention without the indexer, against transformers' module, before and after the indexer has a choice."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from rapidkda.engine import families
from rapidkda.engine.model import PackedModel
from rapidkda.testing.models import build_glm5_next

pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("topk", "pool"), [(2048, 16), (32, 16), (16, 4), (8, 1)])
def test_outputs_and_caches_are_the_modules(
    topk: int, pool: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PackedModel(build_glm5_next(4, hidden_size=32, head_dim=16, index_topk=topk, index_kpool=pool, dtype=dtype))
    layer = model.attention[0]
    module: Any = model.layers[layer].self_attn
    rng, scored = random.Random(topk), []
    module.indexer.register_forward_hook(lambda *_: scored.append(short.length(layer)))
    short, untouched = model.new_cache(), model.new_cache()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        got, _ = model.family.attend(module, x, short, None)
        with monkeypatch.context() as patch:
            patch.setattr(families, "sees_all", lambda *_: False)
            want, _ = model.family.attend(module, x, untouched, None)
        scored.pop()
        return got, want

    with torch.no_grad():
        for _ in range(12):
            length = rng.choice((1, 1, 3, 7))
            got, want = both(torch.randn(1, length, 32).to(dtype))
            assert want.abs().max() > 1e-3
            torch.testing.assert_close(got, want)
            for ours, theirs in zip(vars(short.layers[layer]).values(), vars(untouched.layers[layer]).values()):
                assert torch.equal(ours.view(), theirs.view())
            rejected = rng.randrange(length)
            short.crop(short.length(layer) - rejected)
            untouched.crop(untouched.length(layer) - rejected)
    assert all(tokens > topk for tokens in scored)
    assert bool(scored) == (topk < 20)
