"""Draws have the distribution they claim, with and without drafts, and depend on their own request only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rapidkda.engine import Engine, EngineConfig, SamplingParams
from rapidkda.engine.sampling import Sampler, continue_request, distribution

from .support import Knowing, Prompt, plain, random_prompts

DRAWS = 8000
LIMIT = 4.5  # standard deviations; the largest of some dozen frequencies


def logits(*values: float) -> Tensor:
    return torch.tensor(values)


def close(counts: Tensor, probabilities: Tensor) -> bool:
    """Every frequency within `LIMIT` standard deviations of its probability; none where it is 0."""
    total = counts.sum()
    spread = (total * probabilities * (1 - probabilities)).sqrt()
    return bool(((counts - total * probabilities).abs() <= LIMIT * spread + 1e-9).all())


CASES = {
    "temperature": SamplingParams(seed=1, temperature=1.3),
    "low temperature": SamplingParams(seed=1, temperature=0.5),
    "top k": SamplingParams(seed=1, temperature=1.0, top_k=3),
    "top p": SamplingParams(seed=1, temperature=1.0, top_p=0.7),
    "both": SamplingParams(seed=1, temperature=2.0, top_k=5, top_p=0.8),
}


def textbook(values: Tensor, params: SamplingParams) -> Tensor:
    """The same distribution, token by token."""
    weights = {i: torch.exp(values[i].double() / params.temperature).item() for i in range(len(values))}
    ranked = sorted(weights, key=lambda i: -weights[i])
    if params.top_k:
        ranked = ranked[: params.top_k]
    total = sum(weights[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if mass >= params.top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in kept)
    return torch.tensor([weights[i] / total if i in kept else 0.0 for i in range(len(values))], dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution(case: str) -> None:
    params = CASES[case]
    values = logits(0.3, 2.0, -1.0, 1.2, 0.0, 0.9, -2.5)
    want = textbook(values, params)
    assert torch.allclose(distribution(values, params), want, atol=1e-12)
    sampler = Sampler(params)
    counts = torch.bincount(torch.tensor([sampler.draw(values) for _ in range(DRAWS)]), minlength=len(values))
    assert close(counts, want)


def test_a_draw_never_takes_a_token_of_probability_zero() -> None:
    values = logits(-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0))
    assert {sampler.draw(values) for _ in range(500)} == {1, 3}


@pytest.mark.parametrize("draft", [0, 1, 2])
def test_drafts_leave_the_distribution_as_it_is(draft: int) -> None:
    """Whatever is drafted, the first token has the first row's distribution, and so has the second, after the draft."""
    rows = torch.stack([logits(1.0, 0.2, -0.5), logits(-0.3, 0.8, 0.1)])
    params = SamplingParams(temperature=1.0, seed=draft)
    sampler = Sampler(params)
    first, second = torch.zeros(3), torch.zeros(3)
    for _ in range(DRAWS):
        tokens, broken = continue_request(rows, [0, 1], [True, True], [draft], sampler)
        assert not broken
        assert len(tokens) == (2 if tokens[0] == draft else 1)
        first[tokens[0]] += 1
        if len(tokens) == 2:
            second[tokens[1]] += 1
    assert close(first, distribution(rows[0], params))
    assert close(second, distribution(rows[1], params))


def test_greedy_requests_take_the_largest_and_stop_at_the_first_wrong_draft() -> None:
    rows = torch.eye(4)
    best, finite = [0, 1, 2, 3], [True] * 4
    sampler = Sampler(SamplingParams())
    for drafts, want in (([0, 1, 2], [0, 1, 2, 3]), ([0, 3, 2], [0, 1]), ([1, 1, 2], [0])):
        assert continue_request(rows, best, finite, drafts, sampler) == (want, False)
    broken = [True, True, False, True]
    assert continue_request(rows, best, broken, [0, 1, 2], sampler) == ([0, 1], True)
    assert continue_request(rows, best, broken, [0, 2, 2], sampler) == ([0, 1], False)


@pytest.fixture(scope="module")
def drawn(models: dict[str, Any]) -> dict[Prompt, tuple[int, ...]]:
    """Sampled alone."""
    engine = Engine(models["kimi_linear"], EngineConfig(max_num_seqs=1))
    prompts = random_prompts(16, seed=21)
    return {
        prompt: engine.generate([prompt], SamplingParams(max_new_tokens=10, temperature=1.0, seed=seed))[0].tokens
        for seed, prompt in enumerate(prompts)
    }


@pytest.mark.parametrize("rollback", ["replay", "slots"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_seed_gives_the_same_tokens_with_any_batch_mates_and_drafts(
    kimi: Any, drawn: dict[Prompt, tuple[int, ...]], drafts: int, rollback: Any
) -> None:
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=10, max_drafts=drafts, rollback=rollback)
    params = [SamplingParams(max_new_tokens=10, temperature=1.0, seed=seed) for seed in range(len(drawn))]
    results = Engine(kimi, config, Knowing(drawn, seed=1)).generate(list(drawn), params)
    assert [result.tokens for result in results] == list(drawn.values())
    assert (sum(result.stats.accepted for result in results) > 20) == (drafts > 0)


def test_preemption_does_not_change_what_is_drawn(kimi: Any, drawn: dict[Prompt, tuple[int, ...]]) -> None:
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=10, max_cached_tokens=60)
    params = [SamplingParams(max_new_tokens=10, temperature=1.0, seed=seed) for seed in range(len(drawn))]
    results = Engine(kimi, config).generate(list(drawn), params)
    assert [result.tokens for result in results] == list(drawn.values())
    assert sum(result.stats.preemptions for result in results) > 0


def test_seeds_differ_and_are_told(kimi: Any) -> None:
    prompt = random_prompts(1, seed=22)[0]
    engine = Engine(kimi, EngineConfig())
    free = engine.generate([prompt] * 4, SamplingParams(max_new_tokens=12, temperature=1.5))
    assert len({result.tokens for result in free}) == 4
    for result in free:
        params = SamplingParams(max_new_tokens=12, temperature=1.5, seed=result.seed)
        assert engine.generate([prompt], params)[0].tokens == result.tokens


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-310])
def test_a_low_temperature_is_greedy(kimi: Any, temperature: float) -> None:
    prompts = random_prompts(4, seed=23)
    want = plain(kimi, prompts, 8)
    results = Engine(kimi).generate(prompts, SamplingParams(max_new_tokens=8, temperature=temperature))
    assert {result.prompt: result.tokens for result in results} == want


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, ValueError, r"temperature must not be negative, got -1\.0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"top_k": -1}, ValueError, "top_k must be at least 0"),
        ({"top_p": 0.0}, ValueError, r"top_p must be in \(0, 1\], got 0\.0"),
        ({"seed": 2**63}, ValueError, r"seed must be below 2\*\*63"),
        ({"seed": 0.5}, TypeError, "seed must be an int"),
        ({"stop_ids": [1]}, TypeError, "stop_ids must be a tuple of token ids, got list"),
        ({"stop_ids": ("a",)}, TypeError, "stop_ids must be an int"),
    ],
)
def test_parameters_are_refused_by_name(fields: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        SamplingParams(**fields)
