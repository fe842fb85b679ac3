"""The embedded engine: continuous batching of one model on one machine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..serving import StatePool, StepBatch, StepRequest, Workspace, plan_bytes
from .config import EngineConfig
from .drafts import Drafter, Progress, PromptLookup
from .invariant import RowByRow
from .model import PackedModel, Span
from .mtp import MtpDrafter, MtpHead
from .request import FinishReason, Request, RequestResult, RequestStats, TokenEvent
from .sampling import Sampler, SamplingParams, continue_request
from .scheduler import Part, Scheduler


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes that an engine holds beside the model's weights.

    Attributes:
        states: recurrent states, convolution histories and draft records; as `plan_bytes` plans them.
        workspace: scratch of the KDA layers.
        tables: step tables on the device.
        drafter: what the drafter holds.
        attention: caches of the attention layers now; they grow with the running requests.
    """

    states: int
    workspace: int
    tables: int
    drafter: int
    attention: int

    @property
    def total(self) -> int:
        return self.states + self.workspace + self.tables + self.drafter + self.attention


class Engine:
    """Runs many requests on one model, a step at a time. Not for several threads at once.

    Args:
        model: `Glm5NextForConditionalGeneration` or `KimiLinearForCausalLM` of transformers, in evaluation mode.
            The engine takes over the storage of its KDA weights (see `rapidkda.engine.weights`); the model goes on
            working beside it.
        config: limits and choices.
        drafter: "lookup" for drafts from the request's own text, an `MtpHead`, or any `Drafter`; used with
            `config.max_drafts` above 0.

    Raises ValueError, TypeError, `ConfigConflict` or `BackendUnavailable` for what cannot be run here.
    """

    def __init__(self, model: Any, config: EngineConfig | None = None, drafter: Drafter | MtpHead | str = "lookup"):
        self.config = config or EngineConfig()
        self.model = PackedModel(
            model,
            state_dtype=self.config.state_dtype,
            backends=self.config.backends,
            one_by_one=self.config.batch_invariant,
        )
        shape = self.model.state_shape(self.config.max_drafts, self.config.rollback, self.config.record_rows)
        prefill = self.model.first_layer.choices["prefill"]
        limits, device, dtype = self.config.limits, self.model.device, self.model.dtype
        self._planned = {
            "states": plan_bytes(shape, self.config.slots, len(self.model.kda)),
            "workspace": Workspace.plan_bytes(shape, limits, prefill, dtype=dtype),
        }
        self._pool = StatePool(shape, self.config.slots, len(self.model.kda), device=device)
        self._batch = StepBatch(self._pool, limits)
        self._workspace = Workspace(shape, limits, prefill, dtype=dtype, device=device)
        self._workspace.lock()
        self._drafter = self._make_drafter(drafter)
        self._scheduler = Scheduler(self.config, self._pool, self._restart)
        self._requests: dict[Hashable, Request] = {}
        self._results: dict[Hashable, RequestResult] = {}
        self._ids = itertools.count()

    def _make_drafter(self, drafter: Drafter | MtpHead | str) -> Drafter | None:
        if isinstance(drafter, str) and drafter != "lookup":
            raise ValueError(f"drafter must be 'lookup', an MtpHead or a Drafter, got {drafter!r}")
        if self.config.max_drafts == 0:
            return None
        if isinstance(drafter, MtpHead):
            return MtpDrafter(drafter, self.model, self.config)
        return PromptLookup() if isinstance(drafter, str) else drafter

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: Hashable = None,
        on_token: Callable[[TokenEvent], None] | None = None,
    ) -> Hashable:
        """Queue a request.

        Args:
            prompt: token ids, at least one.
            params: how to go on.
            request_id: any hashable that no other request bears; by default a number is given.
            on_token: called with every event of the request, between steps; it may abort requests and add others.

        Returns:
            The request's id.

        Raises:
            ValueError: no token, a token outside the vocabulary, an id in use, or a request that could never fit
                (names the limit). A request that only does not fit now waits.
        """
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
        tokens = tuple(checks.integer("prompt", token, 0) for token in prompt)
        if not tokens:
            raise ValueError("prompt must hold at least one token, got none")
        if max(tokens) >= self.model.vocab_size:
            raise ValueError(f"prompt must hold token ids below {self.model.vocab_size}, got {max(tokens)}")
        refusal = self._scheduler.refusal(len(tokens), params.max_new_tokens)
        if refusal is not None:
            raise ValueError(refusal)
        if request_id is None:
            request_id = next(n for n in self._ids if n not in self._requests and n not in self._results)
        elif request_id in self._requests or request_id in self._results:
            raise ValueError(f"request_id must not be in use, nor that of a result not yet taken, got {request_id!r}")
        request = Request(
            request_id=request_id,
            prompt=tokens,
            params=params,
            sampler=Sampler(params),
            stats=RequestStats(time.perf_counter(), len(tokens)),
            on_token=on_token,
        )
        self._requests[request_id] = request
        self._scheduler.add(request)
        return request_id

    def abort(self, request_id: Hashable) -> bool:
        """End a request now and free all that it holds. Returns False when there is no such live request."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        event = self._finish(request, "aborted")
        request.aborted = True
        if request.on_token is not None:
            request.on_token(event)
        return True

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    def computed_tokens(self, request_id: Hashable) -> int:
        """Tokens of a live request that states and caches hold: how far its prefill is, and then its text."""
        if request_id not in self._requests:
            raise ValueError(f"request_id must be that of a live request, got {request_id!r}")
        return self._requests[request_id].computed

    def take_result(self, request_id: Hashable) -> RequestResult:
        """The result of a request that has ended; it is handed out once."""
        if request_id not in self._results:
            state = "has not ended" if request_id in self._requests else "is unknown, or its result was taken"
            raise ValueError(f"request_id must be that of an ended request, got {request_id!r}, which {state}")
        return self._results.pop(request_id)

    def step(self) -> list[TokenEvent]:
        """Run one step. Returns what happened, after every callback has been called.

        An exception on the way, an interrupt from the keyboard too, ends the requests of that step with "error" and
        goes on to the caller; the engine can be used further. One of a callback ends no request, and goes on when every
        callback has been called.
        """
        with torch.inference_mode():
            taking_part = self._scheduler.decoding()
            told: list[tuple[Request, TokenEvent]] = []
            try:
                parts = self._scheduler.schedule(self._propose())
                if not parts:
                    return []
                taking_part = [part.request for part in parts]
                hidden = self._forward(parts)
                told = self._settle(parts, hidden)
            except BaseException as failure:
                for request in taking_part:
                    if request.request_id in self._requests:
                        event = self._finish(request, "error", f"{type(failure).__name__}: {failure}")
                        told.append((request, event))
                _tell(told)
                raise
        return _tell(told)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestResult]:
        """Run prompts to their ends, one params for all or one for each; results in the order of the prompts.

        An exception, of a prompt that is refused too, aborts all of them.
        """
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"params must be one for all or one for each of {len(prompts)} prompts, got {len(each)}")
        names: list[Hashable] = []
        try:
            for prompt, one in zip(prompts, each):
                names.append(self.add_request(prompt, one))
            while any(name in self._requests for name in names):
                self.step()
        except BaseException:
            for name in names:
                self.abort(name)
                self._results.pop(name, None)
            raise
        return [self.take_result(name) for name in names]

    def stream(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """The events of one new request as they come; other requests run along. Leaving the iterator aborts it."""
        events: list[TokenEvent] = []
        name = self.add_request(prompt, params, on_token=events.append)
        try:
            while name in self._requests:
                self.step()
                yield from events
                events.clear()
        finally:
            self.abort(name)
            self._results.pop(name, None)

    def memory(self) -> MemoryReport:
        """Bytes held now."""
        return MemoryReport(
            states=self._pool.nbytes,
            workspace=self._workspace.nbytes,
            tables=self._batch.nbytes,
            drafter=0 if self._drafter is None else self._drafter.nbytes,
            attention=sum(r.cache.nbytes for r in self._scheduler.running if r.cache is not None),
        )

    @property
    def planned_bytes(self) -> dict[str, int]:
        """What `states` and `workspace` of the memory report were planned to be, exactly."""
        return dict(self._planned)

    @property
    def free_slots(self) -> int:
        """Slots of the state pool that no request holds."""
        return 0 if self._pool.slots is None else self._pool.slots.available

    def backend_report(self) -> dict[str, Any]:
        """What serves the KDA layers and why; see `KDALayer.backend_report`.

        `decoding` is the entry of `backends` that computes the next tokens of requests.
        """
        decoding = "decode"
        if self.config.verifies:
            decoding = "verify_slots" if self.config.rollback == "slots" else "verify"
        return {**self.model.first_layer.backend_report(), "decoding": decoding}

    def _propose(self) -> dict[Hashable, list[int]]:
        """Drafts for the requests that decode."""
        if self._drafter is None:
            return {}
        most = self.config.max_drafts
        wanted = [(request, min(most, request.useful_drafts)) for request in self._scheduler.decoding()]
        drafts = self._drafter.propose(wanted)
        for (request, count), proposed in zip(wanted, drafts, strict=True):
            if len(proposed) > count or not all(0 <= token < self.model.vocab_size for token in proposed):
                raise ValueError(
                    f"drafter must propose at most {count} token ids below {self.model.vocab_size} for request "
                    f"{request.request_id!r}, got {proposed!r}"
                )
        return {request.request_id: proposed for (request, _), proposed in zip(wanted, drafts)}

    def _forward(self, parts: Sequence[Part]) -> Tensor:
        """Hidden states [T, D] of the step's tokens."""
        for part in parts:
            if part.request.cache is None:
                part.request.cache = self.model.new_cache()
        self._batch.fill([self._record(part) for part in parts])
        for part in parts:
            part.request.accepted = 0
        tokens = [token for part in parts for token in part.tokens]
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.model.device)
        with self._mode():
            return self.model.forward(ids, list(_spans(parts)), self._batch, self._pool, self._workspace)

    def _mode(self) -> AbstractContextManager[Any]:
        return RowByRow() if self.config.batch_invariant else nullcontext()

    def _record(self, part: Part) -> StepRequest:
        request = part.request
        kind: Any = "prefill" if part.prefill else "verify" if self.config.verifies else "decode"
        return StepRequest(
            request.request_id,
            kind,
            len(part.tokens),
            request.slots,
            has_initial_state=request.computed > 0,
            accepted=request.accepted,
        )

    def _settle(self, parts: Sequence[Part], hidden: Tensor) -> list[tuple[Request, TokenEvent]]:
        """Sample, accept, roll back, and end what has ended."""
        told: list[tuple[Request, TokenEvent]] = []
        progress: list[Progress] = []
        choices = self._choose(parts, hidden)
        now = time.perf_counter()
        first = 0
        for part in parts:
            request, rows = part.request, hidden[first : first + len(part.tokens)]
            first += len(part.tokens)
            request.stats.steps += 1
            new, broken = choices.get(request.request_id, ([], False))
            kept = len(part.tokens) if part.prefill else max(1, len(new))
            self._accept(part, kept)
            events = self._extend(request, new, now)
            told += [(request, event) for event in events]
            if request.request_id not in self._requests:
                continue
            if broken and part.drafts:
                # A draft that is not finite spoils the tokens before it too, as attention adds 0 times its values.
                request.drafting = False
                self._scheduler.preempt(request)
            elif broken:
                told.append((request, self._finish(request, "error", "logits are not finite")))
            elif self._drafter is not None:
                following = request.tokens[request.computed - kept + 1 : request.computed + 1]
                progress.append(Progress(request, rows[:kept], following))
        if self._drafter is not None:
            self._drafter.observe(progress)
        return told

    def _choose(self, parts: Sequence[Part], hidden: Tensor) -> dict[Hashable, tuple[list[int], bool]]:
        """For each request that has something to sample: its new tokens, and whether its logits were broken."""
        rows: list[int] = []
        spans: list[tuple[Part, int]] = []
        first = 0
        for part in parts:
            end = first + len(part.tokens)
            if not part.prefill or len(part.tokens) == part.request.pending:
                begin = end - 1 if part.prefill else first
                spans.append((part, end - begin))
                rows += range(begin, end)
            first = end
        if not rows:
            return {}
        index = torch.tensor(rows, device=hidden.device)
        with self._mode():
            logits = self.model.logits(hidden.index_select(0, index))
        finite = torch.isfinite(logits).all(-1).tolist()
        best = logits.argmax(-1).tolist()
        chosen: dict[Hashable, tuple[list[int], bool]] = {}
        start = 0
        for part, count in spans:
            own = slice(start, start + count)
            start += count
            request = part.request
            tokens, broken = continue_request(logits[own], best[own], finite[own], part.drafts, request.sampler)
            if request.params.keep_logits:
                request.logits.append(logits[own][: len(tokens)].to("cpu", torch.float32, copy=True))
            chosen[request.request_id] = tokens, broken
        return chosen

    def _accept(self, part: Part, kept: int) -> None:
        """Keep the first tokens of a part and roll the rest back."""
        request = part.request
        request.computed += kept
        if part.prefill or not self.config.verifies:
            return
        request.accepted = kept
        request.stats.drafted += len(part.drafts)
        request.stats.accepted += kept - 1
        if kept < len(part.tokens) and request.cache is not None:
            request.cache.crop(request.computed)

    def _extend(self, request: Request, new: Sequence[int], now: float) -> list[TokenEvent]:
        """Take new tokens until the request ends."""
        events: list[TokenEvent] = []
        for token in new:
            request.tokens.append(token)
            request.stats.output_tokens += 1
            if request.stats.first_token is None:
                request.stats.first_token = now
            reason: FinishReason | None = None
            if token in request.params.stop_ids:
                reason = "stop"
            elif request.produced >= request.params.max_new_tokens:
                reason = "length"
            if reason is not None:
                self._finish(request, reason)
            events.append(TokenEvent(request.request_id, token, request.produced - 1, reason))
            if reason is not None:
                break
        return events

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> TokenEvent:
        """End a request: free what it holds, and keep its result."""
        request.stats.finished = time.perf_counter()
        self._release(request)
        self._scheduler.remove(request)
        del self._requests[request.request_id]
        self._results[request.request_id] = request.result(reason, error)
        return TokenEvent(request.request_id, None, request.produced, reason, error)

    def _restart(self, request: Request) -> None:
        """Give back what a preempted request holds; it computes its tokens again when it comes back."""
        self._release(request)
        request.stats.preemptions += 1

    def _release(self, request: Request) -> None:
        if request.slots:
            self._pool.free(request.request_id)
        request.slots = ()
        request.cache = None
        request.computed = 0
        request.accepted = 0
        if self._drafter is not None:
            self._drafter.forget(request.request_id)


def _spans(parts: Sequence[Part]) -> Iterator[Span]:
    first = 0
    for part in parts:
        if part.request.cache is not None:
            yield Span(first, len(part.tokens), part.request.cache)
        first += len(part.tokens)


def _tell(told: Sequence[tuple[Request, TokenEvent]]) -> list[TokenEvent]:
    """Call back, unless an earlier callback has ended the request. Returns the events of the others.

    A callback that raises keeps no other from its events: the first exception goes on when all have been called.
    """
    heard: list[TokenEvent] = []
    failure: Exception | None = None
    for request, event in told:
        if request.aborted:
            continue
        heard.append(event)
        if request.on_token is not None:
            try:
                request.on_token(event)
            except Exception as error:
                failure = failure or error
    if failure is not None:
        raise failure
    return heard
