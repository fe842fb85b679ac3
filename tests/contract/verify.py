"""Speculative verification: rollback to any accepted count, in all forms, with the same result as plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rapidkda import Segments
from rapidkda.testing import Inputs, Shape, activated, carried_bar, make_inputs, worst_output_error, worst_state_error

from .cases import case
from .guards import GuardedPool, StatePool, all_zero, same_bits, within
from .target import Target

FORMS = ("slots", "replay", "deferred")
STATE_DTYPES = (torch.float32, torch.bfloat16)
MOST = 4  # 1 + k_max tokens a step
GARBAGE = (-3, 2**31 - 1, 2, -(2**31), 1)  # what `held` holds before the first step


class Speculation:
    """Requests under verification, in any form, on guarded pools. Slot 39 is a trap: only wild indices reach it.

    Deferred states have `rows` records a slot, by default one more than a step has tokens.
    """

    def __init__(
        self,
        target: Target,
        inputs: Inputs,
        form: str,
        most: int = MOST,
        v_first: bool = True,
        state_dtype: torch.dtype = torch.float32,
        rows: int = 0,
        index_dtype: torch.dtype = torch.int32,
    ):
        self.target, self.form, self.v_first, self.index_dtype = target, form, v_first, index_dtype
        self.held: torch.Tensor | None = None
        count = inputs.states.shape[0]
        self.pool = StatePool(target, max(40, count * most + 3), inputs, state_dtype, v_first)
        if form == "slots":
            order = torch.arange(count * most).flip(0).reshape(count, most) + 1
            self.table = order.tolist()
            guarded = torch.full((count + 2, most + 2), 39, dtype=index_dtype)
            guarded[1:-1, 1:-1] = order
            self.slots = guarded.to(target.device)[1:-1, 1:-1]
            self.records = None
        else:
            self.table = [[3 + 2 * n] for n in range(count)]
            self.slots = target.index([row[0] for row in self.table], index_dtype)
            width = 2 * inputs.q.shape[2] + inputs.v.shape[2]
            count, heads = self.pool.storage.shape[0], inputs.v.shape[1]
            self.rows = (rows or most + 1) if form == "deferred" else most
            self.records = GuardedPool(target, count, (self.rows, heads, width), poison=True)
            if form == "deferred":
                self.held = garbage(target, count, heads)
                self.held_before = self.held.clone()
        self.first = [row[0] for row in self.table]
        self.pool.put_states(self.first, inputs.states)

    def step(self, inputs: Inputs, segments: Segments, accepted: Sequence[int]) -> torch.Tensor:
        return self.target.verify(
            inputs,
            segments=segments,
            state=self.pool.view,
            slots=self.slots,
            accepted=self.target.index(list(accepted), self.index_dtype),
            records=None if self.records is None else self.records.view,
            held=self.held,
            state_v_first=self.v_first,
        )

    def leave(self, accepted: Sequence[int]) -> list[int]:
        """The slots that hold the states after the accepted tokens; replay commits them first."""
        if self.records is None:
            return [row[max(a, 1) - 1] for row, a in zip(self.table, accepted, strict=True)]
        self.target.commit(
            state=self.pool.view,
            records=self.records.view,
            slots=self.slots,
            accepted=self.target.index(list(accepted), self.index_dtype),
            held=self.held,
            state_v_first=self.v_first,
        )
        return self.first

    def unchanged(self) -> None:
        self.pool.unchanged(slot for row in self.table for slot in row)
        self.records_unchanged(self.first)

    def records_unchanged(self, written: Sequence[int]) -> None:
        """No records, and no number of them, but in the slots `written`."""
        if self.records is not None:
            self.records.unchanged(written)
        if self.held is not None:
            kept = [row for row in range(self.held.shape[0]) if row not in set(written)]
            same_bits("held of slots that nobody names", self.held[kept], self.held_before[kept])


def garbage(target: Target, rows: int, heads: int) -> torch.Tensor:
    """`held` as memory that nobody has set."""
    return target.index([GARBAGE[n % len(GARBAGE)] for n in range(rows * heads)]).view(rows, heads)


def prefix_of(inputs: Inputs, pieces: Sequence[Sequence[tuple[int, int]]]) -> Inputs:
    """The same operands gathered into one packed sequence a request, from its (first, length) pieces."""
    rows = [torch.cat([torch.arange(f, f + n) for f, n in request]) for request in pieces]
    index = torch.cat(rows).to(inputs.q.device)
    chosen = Inputs(
        *(x.index_select(0, index) for x in inputs.operands()),
        segments=Segments.from_lengths([len(r) for r in rows], inputs.q.device),
        states=inputs.states,
        A_log=inputs.A_log,
        dt_bias=inputs.dt_bias,
        lower_bound=inputs.lower_bound,
        raw_gate=inputs.raw_gate,
        raw_beta=inputs.raw_beta,
        raw_keys=inputs.raw_keys,
    )
    return chosen


@case("B48", form=FORMS, v_first=(True, False))
def drafts_then_plain_steps(target: Target, form: str, v_first: bool) -> None:
    """Four tokens verified, 1 to 4 of them accepted, then a plain decode and a three-token prefill."""
    accepted = [1, 2, 3, 4]
    inputs = activated([8] * 4, dtype=target.dtype, device=target.device, seed=48)  # 4 drafted, 1 decoded, 3 prefilled
    first = [f for f, _ in inputs.spans]
    run = Speculation(target, inputs, form, v_first=v_first)
    limit = target.case_bar()
    drafted = run.step(inputs, Segments.from_lengths([4] * 4, target.device, first), [0] * 4)
    want_out, _ = inputs.expected()
    within("outputs of the drafts", worst_output_error(drafted, want_out, [(f, 4) for f in first]), limit.out)
    read = run.leave(accepted)
    options = {"state": run.pool.view, "slots": target.index(run.first), "state_v_first": v_first}
    decoded = target.decode(
        inputs,
        segments=Segments.from_lengths([1] * 4, target.device, [f + 4 for f in first]),
        read_slots=target.index(read),
        **options,
    )
    filled = target.prefill(
        inputs, segments=Segments.from_lengths([3] * 4, target.device, [f + 5 for f in first]), **options
    )
    kept = prefix_of(inputs, [[(f, a), (f + 4, 4)] for f, a in zip(first, accepted)])
    want_out, want = kept.expected()
    got = torch.zeros(kept.v.shape, dtype=decoded.dtype, device=target.device)
    spans = []
    for (start, _), a, f in zip(kept.spans, accepted, first, strict=True):
        got[start + a] = decoded[f + 4]
        got[start + a + 1 : start + a + 4] = filled[f + 5 : f + 8]
        spans.append((start + a, 4))
    within("outputs after the drafts", worst_output_error(got, want_out, spans), limit.out)
    within("states after the drafts", worst_state_error(run.pool.states(run.first), want), limit.state)
    run.unchanged()


@case("verify", form=FORMS, regime=("slow", "unbounded", "staggered"), dtype=(None, torch.float16))
def verify_after_verify(target: Target, form: str, regime: str, dtype: torch.dtype | None) -> None:
    """Two verifications in a row with different draft counts and accepted counts; only accepted tokens remain. With
    float16 tokens, slots and counts are int64."""
    index_dtype = torch.int32 if dtype is None else torch.int64
    dtype = dtype or target.dtype
    lens, accepted, then = [4, 2, 3, 1], [3, 1, 3, 1], [2, 4, 3, 1]
    shape = Shape("verify", tuple(a + b for a, b in zip(lens, then)), 2)
    inputs = make_inputs(shape, regime, dtype=dtype, device=target.device, seed=21, gaps=True)
    first = [f for f, _ in inputs.spans]
    run = Speculation(target, inputs, form, index_dtype=index_dtype)
    run.step(inputs, Segments.from_lengths(lens, target.device, first), [0] * 4)
    again = [f + n for f, n in zip(first, lens)]
    out = run.step(inputs, Segments.from_lengths(then, target.device, again), accepted)
    kept = prefix_of(inputs, [[(f, a), (g, n)] for f, a, g, n in zip(first, accepted, again, then)])
    want_out, want = kept.expected()
    got = torch.zeros(kept.v.shape, dtype=out.dtype, device=target.device)
    spans = []
    for (start, _), a, f, n in zip(kept.spans, accepted, again, then, strict=True):
        got[start + a : start + a + n] = out[f : f + n]
        spans.append((start + a, n))
    limit = carried_bar(dtype, torch.float32)
    within("outputs of the second step", worst_output_error(got, want_out, spans), limit.out)
    within("states after it", worst_state_error(run.pool.states(run.leave(then)), want), limit.state)
    run.unchanged()


@case("verify", form=("replay", "deferred"))
def records_are_what_they_are_said_to_be(target: Target, form: str) -> None:
    """Key, log decay, correction: the definition folds them into the state, so another backend may go on from them."""
    inputs = make_inputs(Shape("records", (4, 3, 1), 2), "slow", dtype=target.dtype, device=target.device, seed=26)
    run = Speculation(target, inputs, form)
    run.step(inputs, inputs.segments, [0] * 3)
    key_dim, value_dim = inputs.q.shape[2], inputs.v.shape[2]
    folded = []
    for (_, count), slot, state in zip(inputs.spans, run.first, inputs.states, strict=True):
        folded.append(state.double())
        for record in run.records.view[slot, :count].double():
            key, log_decay, correction = record.split((key_dim, key_dim, value_dim), 1)
            folded[-1] = folded[-1] * log_decay.exp()[:, None] + correction[:, :, None] * key[:, None]
    within("states", worst_state_error(torch.stack(folded), inputs.expected()[1]), target.case_bar().state)


@case("verify", form=("replay", "deferred"))
def a_pool_of_no_slots(target: Target, form: str) -> None:
    """Rows of padding alone: there is nothing to read, and their outputs are zero."""
    inputs = make_inputs(Shape("padding", (3, 2), 2), "slow", dtype=target.dtype, device=target.device, seed=24)
    heads, value_dim, key_dim = inputs.states.shape[1:]
    out = target.verify(
        inputs,
        state=inputs.states[:0].to(torch.float32),
        slots=target.index([-1, -1]),
        accepted=target.index([2, 0]),
        records=torch.zeros(0, 4, heads, 2 * key_dim + value_dim, device=target.device),
        held=torch.zeros(0, heads, dtype=torch.int32, device=target.device) if form == "deferred" else None,
        state_v_first=True,
    )
    all_zero("outputs of padding", out)


@case("verify", form=FORMS, dims=((128, 128), (64, 128), (128, 64)), v_first=(True, False), state_dtype=STATE_DTYPES)
def layouts_and_state_dtypes(
    target: Target, form: str, dims: tuple[int, int], v_first: bool, state_dtype: torch.dtype
) -> None:
    """Both layouts, K != V, grouped values, both state dtypes: verify, accept some, verify again."""
    shape = Shape("verify", (4, 4, 3), 2, value_heads=4, key_dim=dims[0], value_dim=dims[1])
    inputs = make_inputs(shape, "slow", dtype=target.dtype, device=target.device, seed=22, layout="fused")
    first = [f for f, _ in inputs.spans]
    run = Speculation(target, inputs, form, v_first=v_first, state_dtype=state_dtype, rows=3)
    inputs.states = run.pool.states(run.first).float()
    run.step(inputs, Segments.from_lengths([3, 2, 1], target.device, first), [0] * 3)
    again = Segments.from_lengths([1, 2, 2], target.device, [f + n for f, n in zip(first, [3, 2, 1])])
    accepted = [3, 1, 1]
    out = run.step(inputs, again, accepted)
    kept = prefix_of(inputs, [[(f, a), (f + n, m)] for f, a, n, m in zip(first, accepted, [3, 2, 1], [1, 2, 2])])
    want_out, want = kept.expected()
    got = torch.zeros(kept.v.shape, dtype=out.dtype, device=target.device)
    spans = []
    for n, (start, _) in enumerate(kept.spans):
        f, length = int(again.host_values()[0][n]), int(again.host_values()[1][n])
        got[start + accepted[n] : start + accepted[n] + length] = out[f : f + length]
        spans.append((start + accepted[n], length))
    limit = carried_bar(target.dtype, state_dtype)
    within("outputs of the second step", worst_output_error(got, want_out, spans), limit.out)
    within("states after it", worst_state_error(run.pool.states(run.leave([1, 2, 2])), want), limit.state)
    run.unchanged()


@case("verify", form=FORMS, regime=("slow", "collinear"), dtype=(torch.float32, torch.bfloat16, torch.float16))
def accuracy_of_drafts(target: Target, form: str, regime: str, dtype: torch.dtype) -> None:
    """The accuracy bars for the outputs of drafts."""
    inputs = make_inputs(Shape("drafts", (4, 4), 2), regime, dtype=dtype, device=target.device, seed=23)
    run = Speculation(target, inputs, form)
    out = run.step(inputs, inputs.segments, [0, 0])
    want_out, want = inputs.expected()
    limit = target.bar(regime, dtype)
    within("outputs", worst_output_error(out, want_out, inputs.spans), limit.out)
    within("states", worst_state_error(run.pool.states(run.leave([4, 4])), want), limit.state)


@case("B47", form=FORMS)
def accepted_counts_out_of_range(target: Target, form: str) -> None:
    """Counts of 0, too many, negative and huge are clamped; no index leaves the request's own row.

    Slot per position: 0 and below mean the first slot. Replay: 0 and below mean no record, too many mean all there are.
    """
    wild = [0, 4, 5, 1, -7, 2**31 - 1]
    inputs = activated([5] * 6, dtype=target.dtype, device=target.device, seed=47)
    first = [f for f, _ in inputs.spans]
    run = Speculation(target, inputs, form, rows=MOST)
    run.step(inputs, Segments.from_lengths([4] * 6, target.device, first), [0] * 6)
    out = run.step(inputs, Segments.from_lengths([1] * 6, target.device, [f + 4 for f in first]), wild)
    least = 1 if form == "slots" else 0
    meant = [min(max(a, least), 4) for a in wild]
    kept = prefix_of(inputs, [[(f, a), (f + 4, 1)] for f, a in zip(first, meant)])
    want_out, want = kept.expected()
    got = torch.zeros(kept.v.shape, dtype=out.dtype, device=target.device)
    spans = []
    for (start, _), a, f in zip(kept.spans, meant, first, strict=True):
        got[start + a] = out[f + 4]
        spans.append((start + a, 1))
    limit = target.case_bar()
    within("outputs", worst_output_error(got, want_out, spans), limit.out)
    within("states", worst_state_error(run.pool.states(run.leave([1] * 6)), want), limit.state)
    run.unchanged()


@case("B54", form=("replay", "deferred"), most=(8, 64))
def drafts_stay_out_of_the_committed_state(target: Target, form: str, most: int) -> None:
    """A verification of any length leaves the slot bit-unchanged; a commit of 1 adds one token."""
    most = min(most, 8) if target.interpreted else most
    inputs = activated([most, most - 3], dtype=target.dtype, device=target.device, seed=54)
    run = Speculation(target, inputs, form, most)
    before = run.pool.storage.clone()
    out = run.step(inputs, inputs.segments, [0, 0])
    same_bits("the pool after a verification", run.pool.storage, before)
    want_out, _ = inputs.expected()
    limit = target.case_bar()
    within("outputs", worst_output_error(out, want_out, inputs.spans), limit.out)
    one = prefix_of(inputs, [[(f, 1)] for f, _ in inputs.spans])
    within(
        "states after a commit of 1",
        worst_state_error(run.pool.states(run.leave([1, 1])), one.expected()[1]),
        limit.state,
    )
    run.unchanged()


@case("B54")
def a_state_for_every_position(target: Target) -> None:
    """Slot per position: slot j holds the state after token j; slots of absent drafts are untouched."""
    inputs = activated([4, 2], dtype=target.dtype, device=target.device, seed=55)
    run = Speculation(target, inputs, "slots")
    run.step(inputs, inputs.segments, [1, 1])
    for n, (first, length) in enumerate(inputs.spans):
        for j in range(length):
            part = prefix_of(inputs, [[(first, j + 1)]])
            want = part.expected(states=inputs.states[n : n + 1])[1]
            error = worst_state_error(run.pool.states([run.table[n][j]]), want)
            within(f"state of request {n} after token {j}", error, target.case_bar().state)
    run.pool.unchanged([*run.table[0], *run.table[1][:2]])


@case("B60", form=("replay", "deferred"), poison=(float("nan"), float("inf")))
def records_past_the_accepted_ones_are_poison(target: Target, form: str, poison: float) -> None:
    """Records that were not accepted may hold anything; a commit of 0 leaves the state bit-unchanged."""
    accepted = [0, 1, 2, 4]
    inputs = activated([4] * 4, dtype=target.dtype, device=target.device, seed=60)
    run = Speculation(target, inputs, form)
    run.step(inputs, inputs.segments, [0] * 4)
    if run.records is None:
        raise AssertionError("the replay form keeps records")
    for slot, a in zip(run.first, accepted, strict=True):
        run.records.view[slot, a:] = poison
    untouched = run.pool.view[run.first[0]].clone()
    run.leave(accepted)
    same_bits("state after a commit of 0", run.pool.view[run.first[0]], untouched)
    kept = prefix_of(inputs, [[(f, a)] for (f, _), a in zip(inputs.spans, accepted)])
    within("states", worst_state_error(run.pool.states(run.first), kept.expected()[1]), target.case_bar().state)
    run.unchanged()


@case("B50", form=FORMS)
def plain_rows_before_drafts(target: Target, form: str) -> None:
    """Rows of one token and of drafts mixed, scattered over the token axis, with very different gates a token."""
    lens = [1, 3, 0, 4, 1]
    inputs = activated(lens, dtype=target.dtype, device=target.device, seed=50, gaps=True, layout="fused")
    for first, length in inputs.spans:
        for j in range(length):
            inputs.g[first + j] = (-0.01, -0.5, -0.02, -1.0)[(first + j) % 4]
    run = Speculation(target, inputs, form)
    out = run.step(inputs, inputs.segments, [0] * 5)
    want_out, want = inputs.expected()
    limit = target.case_bar()
    within("outputs", worst_output_error(out, want_out, inputs.spans), limit.out)
    slots = run.leave([max(1, n) for n in lens])
    rows = [0, 1, 3, 4]
    within("states", worst_state_error(run.pool.states([slots[n] for n in rows]), want[rows]), limit.state)
    run.unchanged()


@case("B61", form=FORMS)
def padding_rows_of_a_verification(target: Target, form: str) -> None:
    """A row whose slots are the padding marker writes zeros and touches neither pool nor records."""
    inputs = activated([3, 2, 1], dtype=target.dtype, device=target.device, seed=62)
    run = Speculation(target, inputs, form)
    run.slots[1] = -1
    out = run.step(inputs, inputs.segments, [0, 2, 0])
    first, length = inputs.spans[1]
    all_zero("outputs of the padding row", out[first : first + length])
    want_out, _ = inputs.expected()
    spans = [inputs.spans[0], inputs.spans[2]]
    within("outputs of real rows", worst_output_error(out, want_out, spans), target.case_bar().out)
    run.pool.unchanged(slot for n in (0, 2) for slot in run.table[n])
    run.records_unchanged([run.first[0], run.first[2]])


@case("verify", form=FORMS, most=(4, 8), slow_when_interpreted=True)
def more_requests_than_run_at_once(target: Target, form: str, most: int) -> None:
    """Requests of every length, empty and padding ones among them, verified twice with any number accepted."""
    count = 90
    lens = [(5 * n) % (most + 1) for n in range(count)]
    then = [(3 * n + 1) % (most + 1) for n in range(count)]
    inputs = activated([a + b for a, b in zip(lens, then)], dtype=target.dtype, device=target.device, seed=63)
    first = [f for f, _ in inputs.spans]
    run = Speculation(target, inputs, form, most)
    padding = [n for n in range(count) if n % 13 == 5]
    run.slots[padding] = -1
    run.step(inputs, Segments.from_lengths(lens, target.device, first), [0] * count)
    least = 1 if form == "slots" else 0
    accepted = [least + n % (length + 1 - least) if length else 0 for n, length in enumerate(lens)]
    again = [f + n for f, n in zip(first, lens)]
    out = run.step(inputs, Segments.from_lengths(then, target.device, again), accepted)
    real = [n for n in range(count) if n not in padding and then[n]]
    kept = prefix_of(inputs, [[(first[n], accepted[n]), (again[n], then[n])] for n in real])
    kept.states = inputs.states[real]
    want_out, want = kept.expected()
    got = torch.zeros(kept.v.shape, dtype=out.dtype, device=target.device)
    spans = []
    for (start, _), n in zip(kept.spans, real, strict=True):
        got[start + accepted[n] : start + accepted[n] + then[n]] = out[again[n] : again[n] + then[n]]
        spans.append((start + accepted[n], then[n]))
    limit = target.case_bar()
    within("outputs of the second step", worst_output_error(got, want_out, spans), limit.out)
    for n in padding:
        all_zero("outputs of a padding row", out[again[n] : again[n] + then[n]])
    slots = run.leave([length if n in set(real) else 0 for n, length in enumerate(then)])
    within("states after it", worst_state_error(run.pool.states([slots[n] for n in real]), want), limit.state)
    run.pool.unchanged(slot for n in range(count) if n not in padding for slot in run.table[n])
