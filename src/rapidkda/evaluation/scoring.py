"""Log-probabilities of given texts, computed as an engine computes them.

A passage is prefilled in chunks and then goes on in decode and verify steps, on the engine's packed model, state pool
and step tables. Its own tokens are fed whatever the model would have said, so that every run of every backend reads the
same text. Verify steps carry drafts that are wrong on purpose too, which must leave no trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .. import checks
from ..engine.cache import AttentionCache
from ..engine.model import PackedModel, Span
from ..problem import Rollback
from ..serving import BackendWish, StatePool, StepBatch, StepLimits, StepRequest, Workspace

Kind = Literal["prefill", "decode", "verify"]
KINDS: tuple[Kind, ...] = ("prefill", "decode", "verify")
MOST_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class Move:
    """One step after the prefill: `right` tokens of the text are accepted, `wrong` false drafts follow them.

    A decode step has one right token; a verify step 1 to 1 + `MOST_DRAFTS` tokens, the first of them right.
    """

    kind: Literal["decode", "verify"]
    right: int = 1
    wrong: int = 0


# The end of a text in ordinary decode steps, in verify steps that accept all, some and none of their drafts, and in
# both, which a request may mix.
DECODE = (Move("decode"),)
VERIFY = (Move("verify", 4), Move("verify", 2, 2), Move("verify", 3), Move("verify", 1, 3), Move("verify", 1))
MIXED = (Move("verify", 4), Move("verify", 4), Move("decode"), Move("verify", 3, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A text to score.

    Attributes:
        tokens: token ids, at least 2.
        prefill: leading tokens that are prefilled, at least 1.
        moves: how the rest is fed, over and over.
        scored: positions whose next token is scored, ascending, below len(tokens) - 1; None for all of them.
    """

    tokens: tuple[int, ...]
    prefill: int
    moves: tuple[Move, ...] = DECODE
    scored: tuple[int, ...] | None = None

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(range(len(self.tokens) - 1)) if self.scored is None else self.scored


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """What the model says of one passage.

    Attributes:
        logprobs: float32 [n, vocabulary] on the host, one row a scored position.
        targets: int64 [n], the token that follows each of them.
        kinds: the kind of step that computed each of them.
    """

    logprobs: Tensor
    targets: Tensor
    kinds: tuple[Kind, ...]

    def right(self) -> Tensor:
        """bool [n]: the next token is the most likely one."""
        return self.logprobs.argmax(-1) == self.targets


class Scorer:
    """Scores passages with one model and one choice of backends.

    Args:
        model: as `rapidkda.engine.Engine` takes it.
        backends: what runs the KDA layers.
        chunk: most tokens of a passage in one prefill step.
        max_tokens: most tokens of a step.
        max_passages: passages that run at once.
        rollback: how rejected drafts are undone.

    Raises what `Engine` raises for a model or a backend that cannot run.
    """

    def __init__(
        self,
        model: Any,
        backends: BackendWish | None = None,
        *,
        chunk: int = 512,
        max_tokens: int = 8192,
        max_passages: int = 64,
        rollback: Rollback = "replay",
    ):
        self.chunk = checks.integer("chunk", chunk, 1)
        self.max_passages = checks.integer("max_passages", max_passages, 1)
        self.max_tokens = checks.integer("max_tokens", max_tokens, max(chunk, (1 + MOST_DRAFTS) * max_passages))
        self.model = PackedModel(model, backends=backends)
        shape = self.model.state_shape(MOST_DRAFTS, rollback)
        limits = StepLimits(max_tokens=max_tokens, max_requests=max_passages, max_checkpoints=0)
        layer, device = self.model.first_layer, self.model.device
        slots = max_passages * shape.slots_per_request
        self._pool = StatePool(shape, slots, len(self.model.kda), device=device)
        self._batch = StepBatch(self._pool, limits)
        self._workspace = Workspace(shape, limits, layer.choices["prefill"], dtype=self.model.dtype, device=device)

    @torch.inference_mode()
    def score(self, passages: Sequence[Passage]) -> list[Scored]:
        """Log-probabilities of every passage, in order."""
        runs = [_Run(index, passage) for index, passage in enumerate(passages)]
        for first in range(0, len(runs), self.max_passages):
            self._score(runs[first : first + self.max_passages])
        return [run.result() for run in runs]

    def _score(self, runs: Sequence[_Run]) -> None:
        for run in runs:
            run.slots = self._pool.allocate(run.index)
            run.cache = self.model.new_cache()
        live = list(runs)
        while live:
            steps = list(self._schedule(live))
            self._keep(steps, self._forward(steps))
            for step in steps:
                step.run.settle(step)
            for run in [run for run in live if run.done]:
                self._pool.free(run.index)
                run.cache = None
                live.remove(run)

    def _schedule(self, live: Sequence[_Run]) -> Iterator[_Step]:
        """Every passage's next tokens, as far as the step holds them; those past their prefill go first."""
        budget = self.max_tokens
        for run in sorted(live, key=lambda run: run.prefilling):
            step = run.next(min(self.chunk, budget))
            if step is not None and len(step.tokens) <= budget:
                budget -= len(step.tokens)
                yield step

    def _forward(self, steps: Sequence[_Step]) -> Tensor:
        self._batch.fill([step.request() for step in steps])
        ids = torch.tensor([token for step in steps for token in step.tokens], device=self.model.device)
        return self.model.forward(ids, list(_spans(steps)), self._batch, self._pool, self._workspace)

    def _keep(self, steps: Sequence[_Step], hidden: Tensor) -> None:
        """Hand each passage the log-probabilities that it asked for."""
        rows: list[int] = []
        counts: list[int] = []
        first = 0
        for step in steps:
            wanted = step.run.wanted(step.right)
            rows += [first + row for row in wanted]
            counts.append(len(wanted))
            first += len(step.tokens)
        if rows:
            index = torch.tensor(rows, device=hidden.device)
            logprobs = torch.log_softmax(self.model.logits(hidden.index_select(0, index)).float(), dim=-1)
            for step, part in zip(steps, logprobs.split(counts)):
                step.run.keep(step.kind, part)


def _spans(steps: Sequence[_Step]) -> Iterator[Span]:
    first = 0
    for step in steps:
        if step.run.cache is not None:
            yield Span(first, len(step.tokens), step.run.cache)
        first += len(step.tokens)


@dataclass(slots=True, eq=False)
class _Step:
    """One passage's part of a step: its tokens, the leading `right` of which stay."""

    run: _Run
    kind: Kind
    tokens: list[int]
    right: int

    def request(self) -> StepRequest:
        run = self.run
        return StepRequest(
            run.index,
            self.kind,
            len(self.tokens),
            run.slots,
            has_initial_state=run.computed > 0,
            accepted=run.accepted,
        )


class _Run:
    """One passage on its way. The last token is never fed: nothing is asked after it."""

    def __init__(self, index: int, passage: Passage):
        if len(passage.tokens) < 2 or not 1 <= passage.prefill <= len(passage.tokens):
            raise ValueError(
                f"passage {index} must hold 2 tokens or more and prefill 1 to all of them, "
                f"got {len(passage.tokens)} and {passage.prefill}"
            )
        self.index = index
        self.slots: tuple[int, ...] = ()
        self.cache: AttentionCache | None = None
        self.computed = 0
        self.accepted = 0
        self._passage = passage
        self._end = len(passage.tokens) - 1
        self._prefill = min(passage.prefill, self._end)
        self._positions = passage.positions
        self._kept = 0  # positions that have been scored
        self._moves = 0
        self._rows: list[Tensor] = []
        self._kinds: list[Kind] = []

    @property
    def done(self) -> bool:
        return self.computed == self._end

    @property
    def prefilling(self) -> bool:
        return self.computed < self._prefill

    def next(self, most: int) -> _Step | None:
        """The next step with a prefill of at most `most` tokens; None when that leaves nothing."""
        tokens, start = self._passage.tokens, self.computed
        if self.prefilling:
            count = min(most, self._prefill - start)
            return _Step(self, "prefill", list(tokens[start : start + count]), count) if count > 0 else None
        move = self._passage.moves[self._moves % len(self._passage.moves)]
        right = min(move.right, self._end - start)
        # false drafts: neighbours of the right tokens in the vocabulary, which are never the right ones
        wrong = [token - 1 if token else 1 for token in tokens[start + right : start + right + move.wrong]]
        return _Step(self, move.kind, [*tokens[start : start + right], *wrong], right)

    def wanted(self, right: int) -> list[int]:
        """Rows of the next `right` tokens whose next token is scored."""
        rows = []
        while self._kept < len(self._positions) and self._positions[self._kept] < self.computed + right:
            rows.append(self._positions[self._kept] - self.computed)
            self._kept += 1
        return rows

    def keep(self, kind: Kind, logprobs: Tensor) -> None:
        self._rows.append(logprobs)
        self._kinds += [kind] * len(logprobs)

    def settle(self, step: _Step) -> None:
        """Keep the right tokens of a step and roll the others back."""
        self.computed += step.right
        self.accepted = step.right if step.kind == "verify" else 0
        if step.kind != "prefill":
            self._moves += 1
        if step.right < len(step.tokens) and self.cache is not None:
            self.cache.crop(self.computed)

    def result(self) -> Scored:
        targets = [self._passage.tokens[position + 1] for position in self._positions]
        return Scored(torch.cat(self._rows).cpu(), torch.tensor(targets), tuple(self._kinds))
