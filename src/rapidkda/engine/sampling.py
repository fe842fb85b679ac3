"""From logits to tokens.

A token is drawn by its request's own generator, one draw a token, and a draft is accepted when it is the token that was
drawn. For a draft that is certain (a point mass, as all drafts here are) this is rejection sampling: the draft d is
accepted with probability p(d), and what replaces it otherwise is distributed as p without d. So speculation leaves the
distribution as it is, and more: the draw of a position is the same with any drafts and any batch mates.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import checks

SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is continued.

    Attributes:
        max_new_tokens: tokens to generate at most.
        temperature: 0 takes the most likely token; above 0 divides the logits.
        top_k: draw from the k most likely tokens only; 0 for all.
        top_p: draw from the smallest set of tokens whose probability reaches this; 1 for all.
        seed: of the request's generator; None draws one, which the result tells.
        stop_ids: tokens that end the request. The stop token is part of the output.
        keep_logits: the result holds the logits of every output token.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    keep_logits: bool = False

    def __post_init__(self) -> None:
        checks.integer("max_new_tokens", self.max_new_tokens, 1)
        if checks.finite("temperature", self.temperature) < 0.0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}")
        checks.integer("top_k", self.top_k, 0)
        if not 0.0 < checks.finite("top_p", self.top_p) <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.seed is not None and checks.integer("seed", self.seed, 0) >= 2**SEED_BITS:
            raise ValueError(f"seed must be below 2**{SEED_BITS}, got {self.seed}")
        checks.boolean("keep_logits", self.keep_logits)
        if not isinstance(self.stop_ids, tuple):
            raise TypeError(f"stop_ids must be a tuple of token ids, got {type(self.stop_ids).__name__}")
        for token in self.stop_ids:
            checks.integer("stop_ids", token, 0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class Sampler:
    """The draws of one request, in order."""

    def __init__(self, params: SamplingParams):
        self.params = params
        self.seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        self._generator = torch.Generator().manual_seed(self.seed)

    def draw(self, logits: Tensor) -> int:
        """The next token from logits [vocabulary], by one uniform number through the cumulative distribution."""
        cumulative = distribution(logits, self.params).cumsum(0)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64) * cumulative[-1]
        # The first token whose cumulative probability exceeds the draw: never one of probability zero.
        return int(torch.searchsorted(cumulative, uniform, right=True).clamp(max=len(cumulative) - 1))


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """float64 probabilities [vocabulary] on the host that a request with temperature > 0 draws from."""
    logits = logits.to("cpu", torch.float64)
    # The largest is taken off first: whatever the temperature, nothing overflows.
    probabilities = torch.softmax((logits - logits.max()) / params.temperature, dim=0)
    if 0 < params.top_k < len(probabilities):
        kept = torch.zeros_like(probabilities, dtype=torch.bool)
        kept[probabilities.topk(params.top_k).indices] = True
        probabilities = probabilities.where(kept, 0.0)
    if params.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True, stable=True)
        reached = ordered.cumsum(0) - ordered >= params.top_p * ordered.sum()  # by the tokens before this one
        probabilities[order[reached]] = 0.0
    return probabilities / probabilities.sum()


def continue_request(
    rows: Tensor, best: Sequence[int], finite: Sequence[bool], drafts: Sequence[int], sampler: Sampler
) -> tuple[list[int], bool]:
    """Take tokens for one request until a draft is rejected or the rows end.

    Args:
        rows: logits [1 + k, vocabulary]; row j is what follows the last accepted token and the first j drafts.
        best: argmax of each row.
        finite: whether each row is finite.
        drafts: the k drafts.
        sampler: of the request.

    Returns:
        The tokens that follow, 1 to 1 + k of them (all but the last are accepted drafts), and whether a row that
        counted was not finite; then the tokens are those before that row.
    """
    tokens: list[int] = []
    for position, (token, valid) in enumerate(zip(best, finite)):
        if not valid:
            return tokens, True
        tokens.append(token if sampler.params.greedy else sampler.draw(rows[position]))
        if position >= len(drafts) or tokens[-1] != drafts[position]:
            break
    return tokens, False
