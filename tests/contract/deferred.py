"""Deferred states: accepted records stay beside a state, which is stored only where the records are full."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from rapidkda import Segments
from rapidkda.testing import (
    Inputs,
    Shape,
    activated,
    carried_bar,
    make_inputs,
    relative_error,
    worst_output_error,
    worst_state_error,
)

from .cases import case
from .guards import all_zero, fail, same_bits, within
from .target import Target
from .verify import STATE_DTYPES, Speculation, prefix_of

REQUESTS = 4


@dataclass
class Story:
    """One request: the tokens of its records, and the state in its slot, which they follow."""

    begin: int  # its tokens
    state: Tensor  # float64 [HV, V, K]
    kept: list[int] = field(default_factory=list)  # tokens whose records lie before those of the last step
    drafted: list[int] = field(default_factory=list)  # tokens of the last step; none: it was no verification
    used: int = 0

    def take(self, count: int) -> list[int]:
        """The next tokens, which nobody has seen."""
        self.used += count
        return [self.begin + self.used - count + n for n in range(count)]


@case("deferred", slow_when_interpreted=True, most=(2, 4, 8, 9), times=(1, 1.5, 2, 4), state_dtype=STATE_DTYPES)
def every_step_of_a_schedule(target: Target, most: int, times: float, state_dtype: torch.dtype) -> None:
    """Random steps of up to `most` tokens with `times` as many records: any number accepted, rows without tokens,
    padding, requests that leave and come back."""
    _Schedule(target, most, int(most * times), state_dtype).run(16)


@case("deferred", state_dtype=STATE_DTYPES)
def steps_of_a_short_schedule(target: Target, state_dtype: torch.dtype) -> None:
    """The same for both state dtypes, short enough for an interpreter."""
    _Schedule(target, 2, 4, state_dtype).run(6 if target.interpreted else 24)


@case("deferred", slow_when_interpreted=True, most=(2, 4), state_dtype=STATE_DTYPES)
def every_step_with_many_records(target: Target, most: int, state_dtype: torch.dtype) -> None:
    """Short steps with 32 records, of requests that stay until these are full."""
    _Schedule(target, most, 32, state_dtype).run(96 // most, leaving=0.05)


class _Schedule:
    """Every request's story, told beside the calls: what they must leave in memory is known after each of them."""

    def __init__(self, target: Target, most: int, rows: int, state_dtype: torch.dtype = torch.float32):
        self.target, self.most, self.rows = target, most, rows
        self.random = Random(most * 100 + rows)
        self.limit = carried_bar(target.dtype, state_dtype)
        self.state_dtype = state_dtype
        self.seen = {"stored": 0, "deferred": 0}

    def run(self, steps: int, leaving: float = 0.3) -> None:
        shape = Shape("schedule", (steps * self.most,) * REQUESTS, 2)
        self.inputs = make_inputs(shape, "slow", dtype=self.target.dtype, device=self.target.device, seed=65)
        self.requests = Speculation(
            self.target, self.inputs, "deferred", self.most, state_dtype=self.state_dtype, rows=self.rows
        )
        self.stories = [
            Story(first, state.double().cpu())
            for (first, _), state in zip(self.inputs.spans, self.requests.pool.states(self.requests.first))
        ]
        for _ in range(steps):
            self.step()
            if self.random.random() < leaving:
                self.leave([self.random.random() < 0.5 for _ in self.stories])
        self.leave([True] * REQUESTS)
        self.requests.unchanged()
        if self.rows > self.most and 0 in self.seen.values():
            fail(f"a schedule must store states and leave them, got {self.seen}")

    def step(self) -> None:
        random, run, stories = self.random, self.requests, self.stories
        counts = [random.choice([0, *range(1, self.most + 1), self.most, self.most]) for _ in stories]
        accepted = [random.randint(1, len(story.drafted)) if story.drafted else 0 for story in stories]
        active = [n for n, count in enumerate(counts) if count and random.random() > 0.15]
        tokens = [story.take(count) for story, count in zip(stories, counts)]
        run.slots.copy_(self.target.index([slot if n in active else -1 for n, slot in enumerate(run.first)]))
        self.spoil(active, accepted)
        before = self.snapshot()
        table = Segments.from_lengths(counts, self.target.device, [row[0] if row else 0 for row in tokens])
        out = run.step(self.inputs, table, accepted)
        past = {n: stories[n].kept + stories[n].drafted[: accepted[n]] if accepted[n] else [] for n in active}
        self.check_outputs(out, tokens, past)
        for n, story in enumerate(stories):
            if n not in active:
                self.check_memory(n, before, 0, 0, stored=False)
                continue
            stored = bool(past[n]) and len(past[n]) + counts[n] > self.rows
            self.seen["stored" if stored else "deferred"] += 1
            if stored:
                self.check_state(n, past[n])
            story.kept, story.drafted = [] if stored else past[n], tokens[n]
            self.check_memory(n, before, len(story.kept), counts[n], stored)
            if run.held is None or run.held[run.first[n]].tolist() != [len(story.kept)] * run.held.shape[1]:
                fail(f"held must be {len(story.kept)} for every head")

    def leave(self, leaving: list[bool]) -> None:
        """Commit some requests, whose next step is no verification after another one."""
        accepted = [
            self.random.randint(1, len(story.drafted)) if gone and story.drafted else 0
            for gone, story in zip(leaving, self.stories)
        ]
        run = self.requests
        run.slots.copy_(self.target.index(run.first))
        self.spoil([n for n, gone in enumerate(leaving) if gone], accepted)
        before = self.snapshot()
        run.leave(accepted)
        for n, story in enumerate(self.stories):
            self.check_memory(n, before, 0, 0, stored=accepted[n] > 0)
            if leaving[n]:
                if accepted[n]:
                    self.check_state(n, story.kept + story.drafted[: accepted[n]])
                story.kept, story.drafted = [], []

    def spoil(self, slots: list[int], accepted: list[int]) -> None:
        """Put NaN or infinity where no record is that counts."""
        for n in slots:
            kept = len(self.stories[n].kept) + accepted[n] if accepted[n] else 0
            self.records[self.requests.first[n], kept:] = self.random.choice([float("nan"), float("inf")])

    @property
    def records(self) -> Tensor:
        if self.requests.records is None:
            raise AssertionError("deferred states keep records")
        return self.requests.records.view

    def snapshot(self) -> list[Tensor | None]:
        held = self.requests.held
        return [self.requests.pool.view.clone(), self.records.clone(), None if held is None else held.clone()]

    def check_outputs(self, out: Tensor, tokens: list[list[int]], past: dict[int, list[int]]) -> None:
        for n, new in enumerate(tokens):
            if n not in past:
                all_zero("outputs of a padding row", out[new])
        chosen = list(past)
        if not chosen:
            return
        kept = prefix_of(self.inputs, [[(t, 1) for t in past[n] + tokens[n]] for n in chosen])
        want, _ = kept.expected(states=torch.stack([self.stories[n].state for n in chosen]))
        got = torch.zeros(kept.v.shape, dtype=out.dtype, device=out.device)
        spans = []
        for (start, _), n in zip(kept.spans, chosen):
            begin = start + len(past[n])
            got[begin : begin + len(tokens[n])] = out[tokens[n]]
            spans.append((begin, len(tokens[n])))
        within("outputs", worst_output_error(got, want, spans), self.limit.out)

    def check_state(self, n: int, tokens: list[int]) -> None:
        """The state in memory is that after `tokens`; the story goes on from what is there."""
        story = self.stories[n]
        kept = prefix_of(self.inputs, [[(t, 1) for t in tokens]])
        got = self.requests.pool.states([self.requests.first[n]])
        within("stored state", worst_state_error(got, kept.expected(states=story.state[None])[1]), self.limit.state)
        story.state = got[0].double().cpu()

    def check_memory(self, n: int, before: list[Tensor | None], base: int, count: int, stored: bool) -> None:
        """Of a request's slot, the state may have changed if `stored`, the records from `base` on, and held if any."""
        slot = self.requests.first[n]
        state, records, held = (None if x is None else x[slot] for x in before)
        if not stored and state is not None:
            same_bits("a state that is not stored", self.requests.pool.view[slot], state)
        if records is not None:
            rows = [row for row in range(self.rows) if not base <= row < base + count]
            same_bits("records of other tokens", self.records[slot, rows], records[rows])
        if not count and held is not None and self.requests.held is not None:
            same_bits("held", self.requests.held[slot], held)


@case("deferred", form=("verify", "commit"))
def held_is_brought_into_range(target: Target, form: str) -> None:
    """Every head has a number of its own, which is clamped like the number accepted; their sum too. With nothing
    accepted it says nothing."""
    rows, heads = 4, 2
    numbers = [(0, 3), (2, 4), (-5, 7), (2**31 - 1, -(2**31)), (1, 2)]
    accepted = [1, 2, 1, 2**31 - 1, 0]
    count = len(numbers)
    inputs = activated([rows + 1] * count, -0.2, heads=heads, dtype=target.dtype, device=target.device, seed=66)
    first = [f for f, _ in inputs.spans]
    run = Speculation(target, inputs, "deferred", rows=rows)
    run.step(inputs, Segments.from_lengths([rows] * count, target.device, first), [0] * count)
    if run.held is None:
        raise AssertionError("deferred states have a number for every head")
    run.held[run.first] = target.index([list(pair) for pair in numbers])
    taken = [
        [min(min(max(h, 0), rows) + min(a, rows), rows) if a else 0 for h in pair] for pair, a in zip(numbers, accepted)
    ]
    before = run.pool.view.clone()
    limit = target.case_bar()
    if form == "commit":
        held = run.held.clone()
        run.leave(accepted)
        same_bits("held after a commit", run.held, held)
    else:
        last = Segments.from_lengths([1] * count, target.device, [f + rows for f in first])
        out = run.step(inputs, last, accepted)
    for n, pair in enumerate(taken):
        for head, used in enumerate(pair):
            want_out, want = _after(inputs, n, head, used)
            stored = used + 1 > rows if form == "verify" else used > 0
            slot = run.first[n]
            if stored:
                within("state", relative_error(run.pool.view[slot, head], want), limit.state)
            else:
                same_bits("state", run.pool.view[slot, head], before[slot, head])
            if form == "verify":
                got = out[first[n] + rows, head]
                within(f"output after {used} records", relative_error(got, want_out), limit.out)
                base = 0 if stored else used
                if int(run.held[slot, head]) != base:
                    fail(f"held must be {base}, got {int(run.held[slot, head])}")
    run.unchanged()


def _after(inputs: Inputs, n: int, head: int, used: int) -> tuple[Tensor, Tensor]:
    """The output of a request's last token after `used` ones, and the state before it."""
    first, length = inputs.spans[n]
    states, pick = inputs.states[n : n + 1], [head]
    with_last = prefix_of(inputs, [[(first, used), (first + length - 1, 1)]])
    out, _ = with_last.expected(heads=pick, states=states)
    state = prefix_of(inputs, [[(first, used)]]).expected(heads=pick, states=states)[1]
    return out[used, 0], state[0, 0]


@case("deferred", slow_when_interpreted=True)
def the_state_of_a_commit(target: Target) -> None:
    """Whatever the number of records, commits leave what storing in every step leaves, beyond rounding."""
    inputs = activated([3] * 4, -0.1, dtype=target.dtype, device=target.device, seed=67)
    first = [f for f, _ in inputs.spans]
    states = []
    for rows in (1, 2, 3, 8):
        run = Speculation(target, inputs, "deferred", 1, rows=rows)
        for step in range(3):
            table = Segments.from_lengths([1] * 4, target.device, [f + step for f in first])
            run.step(inputs, table, [min(step, 1)] * 4)
        states.append(run.pool.states(run.leave([1] * 4)).double().cpu())
    limit = target.case_bar().state
    within("states after one token a step", worst_state_error(states[0], inputs.expected()[1]), limit)
    for other in states[1:]:
        within("states of other numbers of records", worst_state_error(other, states[0]), 2 * limit)
