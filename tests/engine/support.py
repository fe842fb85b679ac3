"""What the engine's tests share: prompts, drafters that know the answer, and what transformers itself says."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rapidkda.engine import Engine, EngineConfig, Progress, Request, RequestResult, SamplingParams
from rapidkda.engine.drafts import Drafter

VOCABULARY = 256
Prompt = tuple[int, ...]


def random_prompts(count: int, seed: int, *, longest: int = 24, shortest: int = 1) -> list[Prompt]:
    """Prompts of mixed lengths, without token 0 (padding) and 255 (kept for faults)."""
    rng = random.Random(seed)
    return [
        tuple(rng.randrange(1, VOCABULARY - 1) for _ in range(rng.randint(shortest, longest))) for _ in range(count)
    ]


class Knowing:
    """Proposes the true continuation, with each token replaced by a random one at some rate, and of random length.

    So that steps accept none, some and all of their drafts. `observe` and `forget` go to another drafter, if given.
    """

    nbytes = 0

    def __init__(
        self, truth: Mapping[Prompt, Sequence[int]], *, seed: int, right: float = 0.8, inner: Drafter | None = None
    ):
        self._truth = truth
        self._rng = random.Random(seed)
        self._right = right
        self._inner = inner

    def observe(self, progress: Sequence[Progress]) -> None:
        if self._inner is not None:
            self._inner.observe(progress)

    def forget(self, request_id: Hashable) -> None:
        if self._inner is not None:
            self._inner.forget(request_id)

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return [self._corrupt(request, count) for request, count in wanted]

    def _corrupt(self, request: Request, count: int) -> list[int]:
        text = [*request.prompt, *self._truth[request.prompt]]
        rest = text[len(request.tokens) : len(request.tokens) + self._rng.randint(0, count)]
        return [token if self._rng.random() < self._right else self._rng.randrange(1, 255) for token in rest]


def plain(model: Any, prompts: Sequence[Prompt], new_tokens: int, **config: Any) -> dict[Prompt, tuple[int, ...]]:
    """What plain greedy generation says, all prompts in one engine."""
    results = run(model, prompts, new_tokens, EngineConfig(**{"max_num_batched_tokens": 256, **config}))
    return {result.prompt: result.tokens for result in results}


def run(
    model: Any, prompts: Sequence[Prompt], new_tokens: int, config: EngineConfig, drafter: Any = "lookup"
) -> list[RequestResult]:
    """Greedy generation; every request must end by length and leave nothing behind."""
    engine = Engine(model, config, drafter)
    results = engine.generate(prompts, SamplingParams(max_new_tokens=new_tokens))
    assert all(result.finish_reason == "length" and len(result.tokens) == new_tokens for result in results)
    assert_empty(engine)
    return results


def assert_empty(engine: Engine) -> None:
    """No request, no slot and no cache is left."""
    assert engine.unfinished == 0
    assert engine.free_slots == engine.config.slots
    assert engine.memory().attention == 0


@torch.no_grad()
def reference_logits(model: Any, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The untouched forward pass of transformers on whole texts, [len, vocabulary] each.

    One batch, filled up on the right, which a causal model does not see.
    """
    longest = max(len(text) for text in texts)
    ids = torch.tensor([[*text, *[1] * (longest - len(text))] for text in texts])
    logits = model(input_ids=ids).logits
    return [logits[row, : len(text)] for row, text in enumerate(texts)]


def greedy_margins(model: Any, outputs: Mapping[Prompt, Sequence[int]]) -> dict[Prompt, tuple[bool, float]]:
    """For each output: whether transformers picks the same token at every place, and its closest decision.

    The margin is the smallest difference between the largest and the second largest logit.
    """
    texts = [[*prompt, *tokens] for prompt, tokens in outputs.items()]
    judged: dict[Prompt, tuple[bool, float]] = {}
    for (prompt, tokens), logits in zip(outputs.items(), reference_logits(model, texts), strict=True):
        rows = logits[len(prompt) - 1 : -1]
        best = rows.topk(2, dim=-1)
        same = best.indices[:, 0].tolist() == list(tokens)
        judged[prompt] = same, float((best.values[:, 0] - best.values[:, 1]).min())
    return judged
