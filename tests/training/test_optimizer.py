"""Muon's orthogonal step, and which parameters take it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rapidkda.training.loop import trained
from rapidkda.training.model import build, text_config
from rapidkda.training.optimizer import Optimizer, orthogonal, takes_muon

from .conftest import TINY


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
def test_singular_values_go_to_about_one(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    got = orthogonal(matrices)
    assert got.shape == matrices.shape
    values = torch.linalg.svdvals(got.float())
    assert values.min() > 0.4
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.cosine_similarity(got.float().flatten(1), (u @ v).flatten(1)).min() > 0.97


def test_matrices_of_hidden_layers_take_muon() -> None:
    named = dict(trained(*build(text_config(**TINY))))
    muon = {name.split("layers.")[-1] for name, parameter in named.items() if takes_muon(name, parameter)}
    for part in ("0.self_attn.q_proj.weight", "0.self_attn.forget_gate.f_b_proj.weight", "3.self_attn.q_b_proj.weight"):
        assert part in muon
    for part in ("embed_tokens.weight", "lm_head.weight", "0.self_attn.b_proj.weight", "0.attn_hc.fn", "norm.weight"):
        assert part not in muon
    assert "mtp.eh_proj.weight" in muon


def test_a_step_lowers_a_simple_loss_and_a_factor_of_zero_moves_nothing() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    optimizer = Optimizer(layer.named_parameters())
    x = torch.randn(64, 8)
    losses = []
    for step in range(60):
        loss = (layer(x) - x.flip(-1)).square().mean()
        loss.backward()
        before = layer.weight.detach().clone()
        optimizer.step(0.0 if step == 0 else 2.0)
        assert torch.equal(before, layer.weight) == (step == 0)
        assert layer.weight.grad is None or not layer.weight.grad.any()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
