"""Prompt lookup against the definition, and the cache's growing buffers against concatenation."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidkda.engine import PromptLookup, Request, RequestStats, SamplingParams
from rapidkda.engine.cache import AttentionCache, causal_mask
from rapidkda.engine.sampling import Sampler


def request_of(tokens: list[int]) -> Request:
    params = SamplingParams()
    request = Request("r", tuple(tokens[:1]), params, Sampler(params), RequestStats(0.0, 1))
    request.tokens = tokens
    return request


def by_definition(text: list[int], count: int, longest: int, shortest: int) -> list[int]:
    """Copy what followed the latest earlier occurrence of the longest possible run of last tokens."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :] and length < len(text):
                copied = list(text)
                for place in range(end, end + count):
                    copied.append(copied[place])
                return copied[len(text) :]
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 7),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**16),
)
def test_prompt_lookup_is_its_definition_as_the_text_grows(
    text: list[int], count: int, longest: int, shortest: int, seed: int
) -> None:
    shortest = min(shortest, longest)
    lookup = PromptLookup(longest, shortest)
    rng = random.Random(seed)
    request = request_of([])
    while text:
        step = rng.randint(1, 5)
        request.tokens += text[:step]
        text = text[step:]
        want = by_definition(request.tokens, count, longest, shortest)
        assert lookup.propose([(request, count)]) == [want]


def test_a_forgotten_request_starts_over() -> None:
    lookup = PromptLookup()
    assert lookup.propose([(request_of([1, 2, 3, 1, 2]), 3)]) == [[3, 1, 2]]
    lookup.forget("r")
    lookup.forget("never seen")
    assert lookup.propose([(request_of([4, 5, 6]), 3)]) == [[]]


def test_run_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="min_ngram must be at least 1, got 0"):
        PromptLookup(3, 0)
    with pytest.raises(ValueError, match="max_ngram must be at least 2, got 1"):
        PromptLookup(1, 2)


def test_caches_grow_and_crop_like_concatenation() -> None:
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    cache = AttentionCache([1, 3])
    keys, values, rows = torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 0, 3), torch.zeros(1, 0, 5)
    for _ in range(60):
        count = rng.choice([1, 1, 2, 7, 40])
        parts = [torch.randn(*shape, generator=generator) for shape in ((1, 2, count, 4), (1, 2, count, 3))]
        row = torch.randn(1, count, 5, generator=generator)
        keys, values = torch.cat([keys, parts[0]], 2), torch.cat([values, parts[1]], 2)
        rows = torch.cat([rows, row], 1)
        got = cache.update(*parts, 3)
        assert torch.equal(got[0], keys)
        assert torch.equal(got[1], values)
        assert torch.equal(cache.update_indexer(row, 3), rows)
        if rng.random() < 0.5:
            length = rng.randint(0, keys.shape[2])
            cache.crop(length)
            keys, values, rows = keys[:, :, :length], values[:, :, :length], rows[:, :length]
        assert cache.length(3) == keys.shape[2]
        assert cache.layers[3].keys is not None
        assert torch.equal(cache.layers[3].keys, keys)
    assert cache.length(1) == 0
    assert cache.nbytes >= keys.nbytes + values.nbytes + rows.nbytes


@pytest.mark.parametrize("additive", [False, True])
def test_masks_show_each_token_what_came_before(additive: bool) -> None:
    assert causal_mask(1, 5, torch.float32, torch.device("cpu"), additive=additive) is None
    mask = causal_mask(3, 2, torch.float32, torch.device("cpu"), additive=additive)
    assert mask is not None
    visible = mask == 0 if additive else mask
    assert visible[0, 0].tolist() == [[j <= 2 + i for j in range(5)] for i in range(3)]
