"""Training through an accelerated model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rapidkda.integrations.transformers import accelerate

from .support import BAR, SIZES, error, kda_layer, run, tokens

pytest.importorskip("transformers", minversion="5.17")


def test_gradients_equal_the_untouched_models(model: Any) -> None:
    ids = tokens(2, 48)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    labels = torch.where(mask.bool(), ids, -100)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = gradients()
    accelerate(model)
    got = gradients()
    model.zero_grad()
    assert got.keys() == want.keys()
    assert any("forget_gate.A_log" in name for name in got)
    for name in want:
        assert error(got[name], want[name]) < 1e-3, name


def test_gradients_do_not_break_the_cache(model: Any) -> None:
    """A cache used outside `no_grad`, as interactive sessions do."""
    ids = tokens(2, 30)
    want, _ = run(model, ids)
    accelerate(model)
    first = model(ids[:, :20], use_cache=True)
    second = model(ids[:, 20:29], past_key_values=first.past_key_values)
    third = model(ids[:, 29:], past_key_values=first.past_key_values)
    got = torch.cat([first.logits, second.logits, third.logits], dim=1)
    assert got.requires_grad
    assert error(got.detach(), want) < BAR


def test_inference_mode_then_training(model: Any) -> None:
    """Index tensors made in inference mode, and kept, must not end up in a graph."""
    accelerate(model)
    layer, hidden = kda_layer(model), torch.randn(2, 23, SIZES["hidden_size"])
    padded = torch.ones(2, 23, dtype=torch.bool)
    padded[1, :5] = False
    for mask in (None, padded):
        with torch.inference_mode():
            want = layer(hidden_states=hidden, attention_mask=mask)
        got = layer(hidden_states=hidden, attention_mask=mask)
        got.sum().backward()
        layer.zero_grad()
        assert error(got.detach(), want) < BAR
