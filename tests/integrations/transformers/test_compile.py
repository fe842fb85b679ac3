"""Accelerated models under torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rapidkda.integrations.transformers import accelerate, restore

from .support import BAR, SIZES, cache_error, error, in_chunks, kda_layer, tokens

transformers = pytest.importorskip("transformers", minversion="5.17")


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_block_keeps_the_layer_in_its_graph(model: Any, compiler: None) -> None:
    """A whole decoder layer, without a break: one shot, several tokens on a filled cache, single tokens."""
    block = next(m for m in model.modules() if kda_layer(model) in m.children())
    streams = (model.config.get_text_config().hc_mult,) if model.config.model_type == "glm5_next" else ()
    hidden = torch.randn(1, 20, *streams, SIZES["hidden_size"])

    def output(function: Any) -> Tensor:
        cache = transformers.DynamicCache(config=model.config)
        parts = [function(hidden[:, a:b], past_key_values=cache) for a, b in ((0, 12), (12, 18), (18, 19), (19, 20))]
        return torch.cat([part[0] if isinstance(part, tuple) else part for part in parts], dim=1)

    with torch.no_grad():
        want = output(block)
        accelerate(model)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        assert error(output(compiled), want) < BAR


def test_compiled_model_equals_itself_uncompiled(built: dict[str, Any], compiler: None) -> None:
    """A left-padded batch: prefill, a chunk on the filled cache, single tokens; logits and caches."""
    model = built["kimi_linear"]
    ids = tokens(2, 44)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    sizes = [32, 10, 1, 1]
    accelerate(model)
    try:
        want, want_cache = in_chunks(model, ids, sizes, mask)
        got, got_cache = in_chunks(torch.compile(model, backend="aot_eager"), ids, sizes, mask)
    finally:
        restore(model)
    assert error(got[mask.bool()], want[mask.bool()]) < BAR
    assert cache_error(got_cache, want_cache) < BAR


@pytest.mark.parametrize("cached", [None, 0, 40], ids=["no cache", "empty cache", "filled cache"])
def test_no_graph_break_beyond_those_of_the_untouched_model(
    built: dict[str, Any], cached: int | None, compiler: None
) -> None:
    """Kimi-Linear has none; GLM breaks at its sparse attention and its experts, which are not rapidkda's."""
    model = built["kimi_linear"]
    accelerate(model)
    try:
        with torch.no_grad():
            cache = None if cached is None else transformers.DynamicCache(config=model.config)
            if cached:
                model(tokens(2, cached), past_key_values=cache)
            ids = tokens(2, 1 if cached else 40)
            found = torch._dynamo.explain(model)(ids, past_key_values=cache, use_cache=cache is not None)
    finally:
        restore(model)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_compiled_training_steps_around_the_layer(model: Any, compiler: None) -> None:
    block = next(m for m in model.modules() if kda_layer(model) in m.children())
    streams = (model.config.get_text_config().hc_mult,) if model.config.model_type == "glm5_next" else ()
    hidden = torch.randn(1, 20, *streams, SIZES["hidden_size"])

    def gradient(function: Any) -> Tensor:
        x = hidden.clone().requires_grad_()
        out = function(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        assert x.grad is not None
        return x.grad

    want = gradient(block)
    accelerate(model)
    assert error(gradient(torch.compile(block, backend="aot_eager")), want) < 1e-3
