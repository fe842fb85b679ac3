"""The small seeded models: reproducible, in the shape of the released ones, without side effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from rapidkda.testing.models import build_glm5_next, build_kimi_linear

BUILDERS = {"glm5_next": build_glm5_next, "kimi_linear": build_kimi_linear}


@pytest.mark.parametrize("family", list(BUILDERS))
def test_seed_decides_the_weights_and_nothing_else(family: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (BUILDERS[family](seed, hidden_size=32, layers=1) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = dict(first.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in again.named_parameters())
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    assert not torch.equal(weights[name], dict(other.named_parameters())[name])


@pytest.mark.parametrize("family", list(BUILDERS))
def test_three_kda_layers_for_each_attention_layer(family: str) -> None:
    model = BUILDERS[family](hidden_size=32, layers=9, heads=1)
    kinds = [kind == "linear_attention" for kind in model.config.get_text_config().layer_types]
    assert kinds == [True, True, True, False, True, True, True, False, True]
    assert sum(hasattr(module, "forget_gate") for module in model.modules()) == 7
    assert not model.training


@pytest.mark.parametrize("family", list(BUILDERS))
def test_kda_carries_weight_in_the_logits(family: str) -> None:
    """A KDA layer that returns nothing must change the logits by a good part of their size."""
    model = BUILDERS[family](hidden_size=64)
    ids = torch.randint(1, 256, (1, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
        assert 0.1 < float(logits.std()) < 10

        def silence(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(output)

        layer = next(module for module in model.modules() if hasattr(module, "forget_gate"))
        layer.register_forward_hook(silence)
        assert float((model(ids).logits - logits).norm() / logits.norm()) > 0.1


def test_dtype_follows_released_checkpoints() -> None:
    for family, kept in (("glm5_next", {"conv1d.weight", "dt_bias", "A_log"}), ("kimi_linear", set())):
        model = BUILDERS[family](hidden_size=32, layers=1, dtype=torch.bfloat16)
        single = {name for name, value in model.named_parameters() if value.dtype == torch.float32}
        found = {name.split("self_attn.")[1].removeprefix("forget_gate.") for name in single if "self_attn." in name}
        assert kept <= found <= {"conv1d.weight", "dt_bias", "A_log"}  # newer releases keep more of them
        assert model(torch.ones(1, 3, dtype=torch.int64), use_cache=False).logits.dtype == torch.bfloat16
