"""A request's life in the engine, and what the caller gets to see of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .cache import AttentionCache
from .sampling import Sampler, SamplingParams

FinishReason = Literal["length", "stop", "aborted", "error"]


@dataclass(slots=True)
class RequestStats:
    """Times are seconds of `time.perf_counter`.

    Attributes:
        added: when the request was added.
        first_token: when its first token was there, or None.
        finished: when it ended, or None.
        prompt_tokens, output_tokens: their counts.
        drafted, accepted: draft tokens that were verified, and that were accepted.
        steps: steps that computed tokens of the request.
        preemptions: how often it was put back into the queue.
    """

    added: float
    prompt_tokens: int
    first_token: float | None = None
    finished: float | None = None
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token, queueing included."""
        return None if self.first_token is None else self.first_token - self.added

    @property
    def time_per_output_token(self) -> float | None:
        """Mean time from one token to the next, after the first; None with fewer than two tokens."""
        if self.first_token is None or self.finished is None or self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of drafted tokens; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Something the caller hears of: a token, or an end without one.

    Attributes:
        request_id: whose.
        token: the token, or None for an end that brings none (aborted, error).
        index: its place in the output.
        finish_reason: why the request ended with this event, or None.
        error: what went wrong, with finish_reason "error".
    """

    request_id: Hashable
    token: int | None
    index: int
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RequestResult:
    """A request that has ended.

    Attributes:
        request_id: its id.
        prompt, tokens: token ids that were given and that were generated.
        finish_reason: "length", "stop", "aborted" or "error".
        error: what went wrong, or None.
        seed: of its generator, given or drawn.
        stats: times and counts.
        logits: float32 [tokens, vocabulary] on the host that each token was taken from, with
            `SamplingParams.keep_logits`; else None.
    """

    request_id: Hashable
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None
    seed: int
    stats: RequestStats
    logits: Tensor | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A request that waits or runs.

    Attributes:
        tokens: prompt and output so far.
        computed: leading tokens that state and caches hold.
        accepted: tokens accepted of the verify step just before, to be told in the next step; 0 if there was none.
        slots: of the state pool, while it runs.
        cache: of the attention layers, while it runs.
        drafting: may have drafts; False after drafts whose logits were not finite.
        logits: that its tokens were taken from, if they are to be kept.
        aborted: the caller has ended it, and hears nothing more of it.
    """

    request_id: Hashable
    prompt: tuple[int, ...]
    params: SamplingParams
    sampler: Sampler
    stats: RequestStats
    on_token: Callable[[TokenEvent], None] | None = None
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    accepted: int = 0
    slots: tuple[int, ...] = ()
    cache: AttentionCache | None = None
    drafting: bool = True
    logits: list[Tensor] = field(default_factory=list)
    aborted: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """One token is pending, after others; else it is in its prefill."""
        return self.computed > 0 and self.pending == 1

    @property
    def produced(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def useful_drafts(self) -> int:
        """Drafts that could all be accepted without passing max_new_tokens: one token comes from the model itself."""
        return max(0, self.params.max_new_tokens - self.produced - 1) if self.drafting else 0

    def result(self, reason: FinishReason, error: str | None) -> RequestResult:
        """What is left of it when it ends."""
        return RequestResult(
            request_id=self.request_id,
            prompt=self.prompt,
            tokens=tuple(self.tokens[len(self.prompt) :]),
            finish_reason=reason,
            error=error,
            seed=self.sampler.seed,
            stats=self.stats,
            logits=torch.cat(self.logits)[: self.produced] if self.logits else None,
        )
