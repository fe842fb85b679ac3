"""Speculation changes nothing but the speed.

In float32 a token that is verified beside its drafts rounds differently from the same token decoded alone, by up to
2e-5 here. Where the two largest logits are closer than that, either is right. So the prompts are 200 random ones whose
every decision is wider than `DECIDED` by the logits of transformers; on them, no difference is accepted. The test in
batch-invariant mode takes its prompts as they come and compares logits to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rapidkda.engine import Engine, EngineConfig, PromptLookup, Request, SamplingParams
from rapidkda.testing.models import build_glm5_next, build_kimi_linear

from .support import Knowing, Prompt, greedy_margins, plain, random_prompts, run

PROMPTS = 200
NEW = 8
DECIDED = 1e-3  # fifty times the rounding


@pytest.fixture(scope="module")
def truths(models: dict[str, Any]) -> dict[str, dict[Prompt, tuple[int, ...]]]:
    """For each family, 200 decided prompts and their plain greedy continuation, which transformers agrees with."""
    found: dict[str, dict[Prompt, tuple[int, ...]]] = {}
    for name, model in models.items():
        outputs = plain(model, random_prompts(PROMPTS + 40, seed=1), NEW)
        judged = greedy_margins(model, outputs)
        decided = [prompt for prompt, (_, margin) in judged.items() if margin > DECIDED][:PROMPTS]
        assert len(decided) == PROMPTS
        assert all(judged[prompt][0] for prompt in decided)
        found[name] = {prompt: outputs[prompt] for prompt in decided}
    return found


@pytest.mark.parametrize("rollback", ["replay", "slots"])
@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("family", ["glm5_next", "kimi_linear"])
def test_the_tokens_are_those_of_plain_greedy_generation(
    models: dict[str, Any],
    truths: dict[str, dict[Prompt, tuple[int, ...]]],
    family: str,
    drafts: int,
    rollback: Any,
) -> None:
    truth = truths[family]
    config = EngineConfig(max_num_batched_tokens=256, max_num_seqs=48, max_drafts=drafts, rollback=rollback)
    results = run(models[family], list(truth), NEW, config, Knowing(truth, seed=drafts))
    assert [result.tokens for result in results] == list(truth.values())
    drafted = sum(result.stats.drafted for result in results)
    accepted = sum(result.stats.accepted for result in results)
    assert drafted > 100
    assert 0.2 < accepted / drafted < 0.95


@pytest.mark.parametrize("rows", [2, 3, 8])
@pytest.mark.parametrize("family", ["glm5_next", "kimi_linear"])
def test_deferred_decodes_give_the_tokens_of_plain_decodes(
    models: dict[str, Any], truths: dict[str, dict[Prompt, tuple[int, ...]]], family: str, rows: int
) -> None:
    truth = truths[family]
    config = EngineConfig(max_num_batched_tokens=256, max_num_seqs=48, record_rows=rows)
    results = run(models[family], list(truth), NEW, config, Knowing(truth, seed=rows))
    assert [result.tokens for result in results] == list(truth.values())
    assert sum(result.stats.drafted for result in results) == 0


class Wrong:
    """Drafts that are never right."""

    nbytes = 0

    def __init__(self, truth: dict[Prompt, tuple[int, ...]]):
        self._truth = truth

    def observe(self, progress: object) -> None:
        pass

    def forget(self, request_id: object) -> None:
        pass

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return [
            [token % 254 + 1 for token in self._truth[request.prompt][request.produced : request.produced + count]]
            for request, count in wanted
        ]


@pytest.mark.parametrize("rollback", ["replay", "slots"])
def test_drafts_that_are_always_or_never_right(
    kimi: Any, truths: dict[str, dict[Prompt, tuple[int, ...]]], rollback: Any
) -> None:
    truth = dict(list(truths["kimi_linear"].items())[:20])
    config = EngineConfig(max_num_batched_tokens=128, max_num_seqs=8, max_drafts=3, rollback=rollback)
    for drafter, rate in ((Knowing(truth, seed=0, right=1.0), 1.0), (Wrong(truth), 0.0)):
        results = run(kimi, list(truth), NEW, config, drafter)
        assert [result.tokens for result in results] == list(truth.values())
        stats = [result.stats for result in results]
        assert sum(one.accepted for one in stats) == rate * sum(one.drafted for one in stats)


def test_prompt_lookup_finds_drafts_in_a_text_that_repeats_itself(model: Any) -> None:
    """An untrained model does not repeat itself, so its continuation is put into the prompt."""
    start = random_prompts(6, seed=4, shortest=8)
    first = plain(model, start, 12)
    repeated = [(*prompt, *tokens, *prompt) for prompt, tokens in first.items()]
    want = plain(model, repeated, 8)
    config = EngineConfig(max_num_batched_tokens=128, max_num_seqs=4, max_drafts=4)
    results = run(model, repeated, 8, config, PromptLookup())
    assert {result.prompt: result.tokens for result in results} == want
    assert sum(result.stats.drafted for result in results) > 0


def logits_of(engine: Engine, prompts: Sequence[Prompt], new_tokens: int) -> dict[Prompt, Tensor]:
    """The logits [new_tokens, vocabulary] that each output token was taken from."""
    results = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens, keep_logits=True))
    for result in results:
        assert result.logits is not None
        assert result.logits.argmax(-1).tolist() == list(result.tokens)
    return {result.prompt: result.logits for result in results if result.logits is not None}


@pytest.mark.parametrize(("build", "count"), [(build_kimi_linear, 10), (build_glm5_next, 4)])
def test_batch_invariant_mode_gives_the_same_bits_alone_in_a_batch_and_with_drafts(build: Any, count: int) -> None:
    model = build(0, hidden_size=32, head_dim=16, experts=4)  # routing may tip either way where it is close
    prompts = random_prompts(count, seed=7, longest=60, shortest=1)
    limits: dict[str, Any] = {
        "max_num_batched_tokens": 48,
        "max_num_seqs": 5,
        "prefill_chunk": 20,
        "batch_invariant": True,
    }
    alone: dict[Prompt, Tensor] = {}
    for prompt in prompts:
        alone |= logits_of(Engine(model, EngineConfig(**limits)), [prompt], 5)
    truth = {prompt: tuple(logits.argmax(-1).tolist()) for prompt, logits in alone.items()}
    together = logits_of(Engine(model, EngineConfig(**limits)), prompts, 5)
    speculative = Engine(model, EngineConfig(max_drafts=3, rollback="slots", **limits), Knowing(truth, seed=2))
    drafted = logits_of(speculative, prompts, 5)
    for prompt in prompts:
        assert torch.equal(together[prompt], alone[prompt])
        assert torch.equal(drafted[prompt], alone[prompt])
