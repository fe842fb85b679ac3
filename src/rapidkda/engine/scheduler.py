"""Who runs in the next step, with how many tokens.

Every running request in its decode gets one token, in the order of admission; then waiting prompts keep a chunk's worth
of the step, drafts take what is left of it, and the prompts get the rest. Requests are admitted in the order in which
they came, as soon as there is a place, a slot and room; none is ever dropped for want of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ..serving import StatePool
from .config import EngineConfig
from .request import Request


@dataclass(slots=True, eq=False)
class Part:
    """One request's part of a step.

    Attributes:
        request: the request.
        tokens: what it feeds: a piece of its prompt, or its last token and `drafts`.
        drafts: draft tokens at the end of `tokens`.
        prefill: a piece of a prompt (or of a text that is computed again).
    """

    request: Request
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    prefill: bool = False


class Scheduler:
    """The queue and the running requests.

    Args:
        config: limits.
        pool: whose slots requests take.
        release: called with a request that is preempted, to give back everything it holds.
    """

    def __init__(self, config: EngineConfig, pool: StatePool, release: Callable[[Request], None]):
        self.config = config
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._pool = pool
        self._release = release

    def refusal(self, prompt_tokens: int, max_new_tokens: int) -> str | None:
        """Why a request of this size could never run, or None."""
        total = prompt_tokens + max_new_tokens
        for name in ("max_model_len", "max_cached_tokens"):
            limit = getattr(self.config, name)
            if limit is not None and total > limit:
                return (
                    f"prompt and max_new_tokens must fit {name} = {limit}, got {prompt_tokens} + {max_new_tokens} "
                    f"= {total} tokens"
                )
        return None

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take out a request that has ended, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def decoding(self) -> list[Request]:
        """Running requests that compute their last token next."""
        return [request for request in self.running if request.decoding]

    def schedule(self, drafts: Mapping[Hashable, Sequence[int]]) -> list[Part]:
        """The next step; empty only when nothing is waiting or running.

        Args:
            drafts: by request id, for requests of `decoding()`.
        """
        budget = self.config.max_num_batched_tokens
        parts = self._decodes()
        budget -= len(parts)
        reserved = min(budget, self._prompt_tokens(), self.config.chunk)
        budget -= self._add_drafts(parts, drafts, budget - reserved)
        for request in self.running:
            if not request.decoding:
                budget -= self._add_prefill(parts, request, budget)
        while self.waiting and budget > 0 and self._admits(self.waiting[0], budget):
            request = self.waiting.popleft()
            request.slots = self._pool.allocate(request.request_id)
            self.running.append(request)
            budget -= self._add_prefill(parts, request, budget)
        return parts

    def _decodes(self) -> list[Part]:
        """One token each; when there is no room for it, the youngest requests go back into the queue."""
        parts: list[Part] = []
        for request in self.decoding():
            if request not in self.running:
                continue  # preempted for an older one
            while self._room(parts) < 1:
                youngest = self.running[-1]
                self.preempt(youngest)
                if youngest is request:
                    break
            else:
                parts.append(Part(request, [request.tokens[-1]]))
        return parts

    def _add_drafts(self, parts: Sequence[Part], drafts: Mapping[Hashable, Sequence[int]], budget: int) -> int:
        used = 0
        for part in parts:
            count = max(0, min(budget - used, self._room(parts)))
            part.drafts = list(drafts.get(part.request.request_id, ()))[:count]
            part.tokens += part.drafts
            used += len(part.drafts)
        return used

    def _add_prefill(self, parts: list[Part], request: Request, budget: int) -> int:
        available = min(budget, self._room(parts))
        count = min(request.pending, self.config.chunk) if self.config.batch_invariant else request.pending
        if self.config.batch_invariant and count > available:
            return 0  # chunks are cut at fixed places
        count = min(count, available)
        if count > 0:
            start = request.computed
            parts.append(Part(request, request.tokens[start : start + count], prefill=True))
        return max(count, 0)

    def _admits(self, request: Request, budget: int) -> bool:
        if len(self.running) >= self.config.max_num_seqs:
            return False
        slots = self._pool.slots
        if slots is None or slots.available < self._pool.shape.slots_per_request:
            return False
        if self.config.batch_invariant and min(request.pending, self.config.chunk) > budget:
            return False
        if self.config.max_cached_tokens is None:
            return True
        planned = sum(len(other.tokens) + 1 for other in self.running)
        return planned + len(request.tokens) + 1 <= self.config.max_cached_tokens

    def preempt(self, request: Request) -> None:
        """Put a running request back at the head of the queue, to compute its tokens again."""
        self._release(request)
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _prompt_tokens(self) -> int:
        """Tokens of prompts that could be computed now."""
        started = sum(request.pending for request in self.running if not request.decoding)
        waiting = self.waiting[0].pending if self.waiting and len(self.running) < self.config.max_num_seqs else 0
        return started + waiting

    def _room(self, parts: Sequence[Part]) -> int:
        """Tokens that the attention layers may still keep."""
        if self.config.max_cached_tokens is None:
            return self.config.max_num_batched_tokens
        held = sum(request.computed for request in self.running)
        return self.config.max_cached_tokens - held - sum(len(part.tokens) for part in parts)
