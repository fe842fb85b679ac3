"""The training forward computes what transformers' own forward and the engine's MTP head compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rapidkda import engine
from rapidkda.engine.config import EngineConfig
from rapidkda.engine.drafts import Progress
from rapidkda.engine.model import PackedModel
from rapidkda.engine.mtp import MtpDrafter
from rapidkda.engine.request import Request, RequestStats
from rapidkda.engine.sampling import Sampler
from rapidkda.training.forward import TrainingForward
from rapidkda.training.kda import kda_from, working_kda
from rapidkda.training.loop import trained
from rapidkda.training.model import MtpHead, build, text_config

from .conftest import TINY


def shaken(seed: int) -> tuple[Any, MtpHead]:
    """A tiny model and head, none of whose parameters is at a special value such as zero."""
    model, head = build(text_config(**TINY), seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in [*model.parameters(), *head.parameters()]:
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval(), head


def forward_of(model: Any, head: MtpHead, *, compiled: bool = False) -> TrainingForward:
    return TrainingForward(model, head, kda_from("transformers"), dtype=torch.float32, compiled=compiled)


def random_tokens(rows: int, length: int) -> Tensor:
    return torch.randint(1, 256, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize(("rows", "length"), [(1, 7), (3, 150)])
def test_logits_equal_those_of_transformers(rows: int, length: int) -> None:
    model, head = shaken(1)
    forward, tokens = forward_of(model, head), random_tokens(rows, length)
    want = model(input_ids=tokens).logits
    torch.testing.assert_close(forward.logits(forward.hidden(tokens)).view_as(want), want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_head_equals_the_engines() -> None:
    """The engine's drafter over the same hidden states and tokens, a step at a time and all at once."""
    model, head = shaken(2)
    forward, tokens = forward_of(model, head), random_tokens(1, 40)
    hidden = forward.hidden(tokens)
    want = forward.ahead(hidden, tokens.roll(-1, 1))
    served = engine.MtpHead.from_config(model.config.get_text_config(), dtype=torch.float32)
    served.load_weights({f"mtp.{name}": value for name, value in head.state_dict().items()})
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=1)
    drafter = MtpDrafter(served, PackedModel(model), config)
    params = engine.SamplingParams()
    request = Request("a", (1,), params, Sampler(params), RequestStats(added=0.0, prompt_tokens=1))
    settled = 0
    for count in (25, 1, 13):
        part = slice(settled, settled + count)
        drafter.observe([Progress(request, hidden[part], tokens[0, part.start + 1 : part.stop + 1].tolist())])
        settled += count
        torch.testing.assert_close(drafter._tracks["a"].hidden, want[settled - 1], rtol=1e-4, atol=1e-4)


def test_every_trained_parameter_has_a_gradient_and_only_those() -> None:
    model, head = shaken(3)
    forward, tokens = forward_of(model, head), random_tokens(2, 64)
    hidden = forward.hidden(tokens)
    targets = tokens.roll(-1, 1)
    loss, _ = forward.losses(hidden, targets.reshape(-1))
    ahead, _ = forward.losses(forward.ahead(hidden, targets), targets.reshape(-1))
    (loss.mean() + ahead.mean()).backward()
    moved = dict(trained(model, head))
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in moved.values())
    others = [p for p in nn.ModuleList([model, head]).parameters() if all(p is not q for q in moved.values())]
    assert others  # the indexer and the vision tower
    assert all(parameter.grad is None for parameter in others)


def test_the_first_source_that_works_is_taken() -> None:
    name, kda = working_kda(torch.device("cpu"), 32)
    assert name == "transformers"
    x = torch.randn(1, 5, 1, 32)
    assert kda(x, x, x, -x.abs(), torch.rand(1, 5, 1)).shape == (1, 5, 1, 32)
    with pytest.raises(ValueError, match="kda must be one of"):
        kda_from("other")
