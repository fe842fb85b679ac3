"""Rows of the serving operators on a device: every backend of ours that can run, and every peer that is present.

Each implementation of a workload reads the same inputs, strided as an engine passes them. What is timed is checked in
the same run: outputs and states are poisoned, the last replay's results are compared with float64 on a sample of
sequences and heads, and a miss is reported as such. One of ours makes the run fail.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Literal

import torch
from torch import Tensor

from .. import ops
from ..backends.base import Request
from ..device import Device
from ..dispatch import Choice, load, resolve
from ..problem import GateKind, Op, Sizes
from ..segments import Segments
from ..serving.config import StateShape
from ..testing.inputs import Inputs, make_inputs
from ..testing.regimes import Regime
from ..testing.regimes import regime as regime_by_name
from ..testing.shapes import Shape
from ..testing.tolerances import bar, worst_output_error, worst_state_error
from .peers import Bound, Peer, poison
from .result import Row
from .timing import Settings, copy_bandwidth, device_times, host_time, launches

CACHE_BYTES = 2 * 60 * 2**20  # inputs are rotated until they are twice the L2 cache of a Hopper GPU
MOST_SETS = 8

# How a verification is undone: by replay, its states stored in every step or deferred, or from one slot a position.
Form = Literal["replay", "deferred", "slots"]
SUFFIXES: dict[Form, str] = {"replay": "", "deferred": "-deferred", "slots": "-slots"}  # of a row's implementation

Log = Callable[[str], None]
Expected = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    op: Op
    shapes: tuple[Shape, ...]
    regimes: tuple[str | Regime, ...]
    backends: tuple[str, ...]  # of ours, by name
    peers: tuple[Peer, ...]
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    settings: Settings = field(default_factory=Settings)
    seed: int = 0
    forms: tuple[Form, ...] = ("replay",)  # of verification
    records: int | None = None  # a slot, with deferred states; as serving has them by default
    state_dtype: torch.dtype = torch.float32  # of decode's and verification's pools


@dataclass(frozen=True)
class Measured:
    """Rows, and a line for each of ours with an error above its bar."""

    rows: list[Row]
    copy_tb_s: float | None
    missed: list[str]


def measure(plan: Plan, log: Log) -> Measured:
    """Time everything, then collect the float64 answers that worker processes computed meanwhile."""
    bandwidth = copy_bandwidth(plan.device)
    rows: list[Row] = []
    missed: list[str] = []
    workers = max(1, min(8, (torch.get_num_threads() or 1) - 1))
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pending: list[tuple[Row, Sample, Expected, Future[Expected]]] = []
        for shape in plan.shapes:
            for regime in map(regime_by_name, plan.regimes):
                pending += _workload(plan, shape, regime, bandwidth, pool, log)
        for row, sample, (out, states), future in pending:
            want, final = future.result()
            errors = worst_output_error(out, want, sample.inputs.spans), worst_state_error(states, final)
            rows.append(replace(row, err_out=errors[0], err_state=errors[1]))
            limit = bar(row.regime, plan.dtype)
            if not (errors[0] <= limit.out and errors[1] <= limit.state):
                name = f"{row.impl} {row.shape} {row.regime}"
                line = f"{name}: errors {errors[0]:.1e}, {errors[1]:.1e} above {limit.out}, {limit.state}"
                if row.impl.split("-")[0] in plan.backends:
                    missed.append(line)
                else:
                    log(line)
    return Measured(rows, bandwidth, missed)


def _workload(
    plan: Plan, shape: Shape, regime: Regime, bandwidth: float | None, pool: ProcessPoolExecutor, log: Log
) -> Iterator[tuple[Row, Sample, Expected, Future[Expected]]]:
    """Every implementation on one workload."""
    moved = io_bytes(shape, plan.dtype, plan.state_dtype)
    held = moved - state_bytes(shape, plan.state_dtype)  # states are written where they were read
    sets = 1 if plan.device.type == "cpu" else min(MOST_SETS, max(1, math.ceil(CACHE_BYTES / held)))
    inputs = [_inputs(plan, shape, regime, plan.seed + i) for i in range(sets)]
    sample = Sample.of(inputs[0])
    passes = {form: _passes(plan, form, shape) for form in plan.forms}
    futures = {count: pool.submit(expected, sample.inputs, count) for count in set(passes.values())}
    floor = None if bandwidth is None else moved / bandwidth / 1e6
    binders: dict[str, tuple[Callable[[Inputs], Bound], str, int]] = {}  # with a note and the passes of its result
    for name, form in itertools.product(plan.backends, plan.forms):
        unmet = load(name).unmet(_request(plan, inputs[0], form))
        if unmet:
            log(f"{shape.name} {regime.name}: {name}{SUFFIXES[form]} left out: {'; '.join(unmet)}")
        else:
            binders[f"{name}{SUFFIXES[form]}"] = _binder(plan, name, form), _note(plan, form, shape), passes[form]
    for peer in plan.peers:
        reason = peer.unmet(plan.op, inputs[0])
        if reason:
            log(f"{shape.name} {regime.name}: {peer.name} left out: {reason}")
        else:
            binders[peer.name] = peer.bind, "", passes[plan.forms[0]]
    for name, (bind, note, count) in binders.items():
        try:
            row, results = _timed(plan, shape, regime.name, name, [bind(one) for one in inputs], sample)
        except torch.cuda.OutOfMemoryError as error:
            log(f"{shape.name} {regime.name}: {name} left out: {str(error).splitlines()[0]}")
            continue
        shown = f"{row.us:10.1f} us" + (f", {row.us / floor:5.2f} x floor" if floor else "")
        log(f"{plan.op} {shape.name} {regime.name} {name}: {shown}, host {row.host_us} us, {row.launches} launches")
        row = replace(row, floor_us=None if floor is None else round(floor, 2), note=row.note + note)
        yield row, sample, results, futures[count]


def _inputs(plan: Plan, shape: Shape, regime: Regime, seed: int) -> Inputs:
    """Operands strided as an engine passes them, and states that the pool's dtype holds exactly."""
    made = make_inputs(shape, regime, dtype=plan.dtype, device=plan.device, seed=seed, layout="fused")
    return replace(made, states=made.states.to(plan.state_dtype).to(made.states.dtype))


def _timed(
    plan: Plan, shape: Shape, regime: str, name: str, bound: Sequence[Bound], sample: Sample
) -> tuple[Row, Expected]:
    times, replays = device_times([one.call for one in bound], plan.device, plan.settings)
    bound[0].reset()
    replays[0]()
    out, states = bound[0].result()
    results = sample.pick(out, states)
    row = Row(
        bench=plan.op,  # type: ignore[arg-type]
        shape=shape.name if plan.state_dtype == torch.float32 else f"{shape.name}_bf16",
        regime=regime,
        impl=name,
        us=times.us,
        us_min=times.us_min,
        us_max=times.us_max,
        host_us=host_time(bound[0].call, plan.device),
        launches=launches(bound[0].call, plan.device),
        floor_us=None,
        err_out=None,
        err_state=None,
        note=f"{str(plan.dtype)[6:]}, {len(bound)} input sets",
    )
    return row, results


def _note(plan: Plan, form: Form, shape: Shape) -> str:
    if plan.op != "verify":
        return ""
    names = {"replay": "replay of records", "slots": "one slot a position"}
    return f", {names.get(form) or f'deferred states, {_records(plan, shape)} records a slot'}"


def _records(plan: Plan, shape: Shape) -> int:
    """Records a slot with deferred states."""
    drafts = max(1, max(shape.seq_lens) - 1)  # one token alone, a decode, has the records of two
    return StateShape(heads=1, max_drafts=drafts, record_rows=plan.records).records_per_slot


def _passes(plan: Plan, form: Form, shape: Shape) -> int:
    """How often a workload's tokens have run when its result is looked at, all of them accepted each time."""
    if plan.op != "verify":
        return 1
    return 1 + (_records(plan, shape) // max(shape.seq_lens) if form == "deferred" else 1)


def expected(inputs: Inputs, passes: int) -> Expected:
    """Float64 outputs and final states of the last of `passes` runs, each from the state that the one before left."""
    states = inputs.states
    for _ in range(passes):
        out, states = inputs.expected(states=states)
    return out, states


def io_bytes(shape: Shape, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> int:
    """Bytes that must move: q, k, v, g, beta read and the output written once in `dtype`, states read and written once
    in `state_dtype`."""
    columns = 2 * shape.heads * shape.key_dim + shape.hv * (2 * shape.value_dim + shape.key_dim + 1)
    return shape.tokens * columns * dtype.itemsize + 2 * state_bytes(shape, state_dtype)


def state_bytes(shape: Shape, state_dtype: torch.dtype) -> int:
    return len(shape.seq_lens) * shape.hv * shape.key_dim * shape.value_dim * state_dtype.itemsize


def _request(plan: Plan, inputs: Inputs, form: Form) -> Request:
    gate: GateKind = "softplus" if inputs.lower_bound is None else "bounded"
    heads, value_heads = inputs.q.shape[1], inputs.v.shape[1]
    return Request(
        plan.op,
        Device.of(plan.device),
        plan.dtype,
        inputs.q.shape[2],
        inputs.v.shape[2],
        gate,
        grouped_values=value_heads > heads,
        rollback="slots" if form == "slots" else "replay",
        deferred=form == "deferred",
    )


def _binder(plan: Plan, name: str, form: Form) -> Callable[[Inputs], Bound]:
    numbers = itertools.count()  # of the input sets

    def bound(inputs: Inputs) -> Bound:
        choice = resolve(_request(plan, inputs, form), name, "bench")
        if plan.op != "verify":
            return (_prefill if plan.op == "prefill" else _decode)(plan, inputs, choice)
        if form == "deferred":
            return _defer(plan, inputs, choice, next(numbers))
        return _verify(plan, inputs, choice, form == "replay")

    return bound


def _prefill(plan: Plan, inputs: Inputs, choice: Choice) -> Bound:
    """In place in a pool, as an engine runs it: slots in reverse order, workspace planned before."""
    pool, slots, reset, result = _pool(plan, inputs)
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=plan.device)
    tokens, heads, key_dim = inputs.q.shape
    value_heads, value_dim = inputs.v.shape[1:]
    sizes = Sizes(tokens, len(inputs.spans), heads, value_heads, key_dim, value_dim, plan.dtype)
    needed = choice.backend.workspace_bytes("prefill", sizes)
    workspace = torch.empty(needed, dtype=torch.uint8, device=plan.device) if needed else None

    def call() -> None:
        ops.prefill(
            *inputs.operands(),
            **inputs.options(),
            segments=inputs.segments,
            state=pool,
            slots=slots,
            out=out,
            workspace=workspace,
            backend=choice,
        )

    return Bound(call, lambda: (out, result()), lambda: reset(out))


def _decode(plan: Plan, inputs: Inputs, choice: Choice) -> Bound:
    pool, slots, reset, result = _pool(plan, inputs)
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=plan.device)

    def call() -> None:
        ops.decode(*inputs.operands(), **inputs.options(), state=pool, slots=slots, out=out, backend=choice)

    return Bound(call, lambda: (out, result()), lambda: reset(out))


def _verify(plan: Plan, inputs: Inputs, choice: Choice, replay: bool) -> Bound:
    """A verify step after one whose tokens were all accepted: replay applies 1 + k records to the state it reads."""
    count, width = len(inputs.spans), inputs.segments.max_length
    heads, value_dim, key_dim = inputs.states.shape[1:]
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=plan.device)
    rows = count * (1 if replay else width)
    pool = torch.empty((rows, heads, value_dim, key_dim), dtype=plan.state_dtype, device=plan.device)
    slots = torch.arange(pool.shape[0], dtype=torch.int32, device=plan.device)
    records = None
    if replay:
        records = torch.empty((count, width, heads, 2 * key_dim + value_dim), device=plan.device)
    else:
        slots = slots.view(count, width)
    first = slots if replay else slots[:, 0]
    none, every = (torch.full((count,), n, dtype=torch.int32, device=plan.device) for n in (0, width))

    def step(accepted: Tensor) -> None:
        _verified(inputs, accepted, out, choice, pool, slots, records)

    def reset() -> None:
        poison(out, pool, *([] if records is None else [records]))
        pool[first.long()] = inputs.states.to(pool.dtype)
        step(none)
        poison(out)

    def result() -> Expected:
        if records is None:
            return out, pool[slots[:, -1].long()]
        ops.commit(state=pool, records=records, held=None, slots=slots, accepted=every, backend=choice)
        return out, pool[slots.long()]

    reset()
    return Bound(lambda: step(every), result, reset)


def _defer(plan: Plan, inputs: Inputs, choice: Choice, number: int) -> Bound:
    """The same with deferred states. A request stores its state in one of `cycle` steps: as in an engine, requests are
    in every phase of that at once, and where they are fewer, input sets are. `reset` takes all of them through `cycle`
    steps of accepted tokens; those that are to be in another phase leave speculation on the way and come back."""
    count, width = len(inputs.spans), inputs.segments.max_length
    heads, value_dim, key_dim = inputs.states.shape[1:]
    rows = _records(plan, Shape("", (width,), heads))
    cycle = rows // width
    out = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=plan.device)
    pool = torch.empty(inputs.states.shape, dtype=plan.state_dtype, device=plan.device)
    records = torch.empty((count, rows, heads, 2 * key_dim + value_dim), device=plan.device)
    held = torch.empty((count, heads), dtype=torch.int32, device=plan.device)
    slots = torch.arange(count, dtype=torch.int32, device=plan.device)
    every = torch.full_like(slots, width)
    phase = (slots + number) % cycle

    def step(accepted: Tensor) -> None:
        _verified(inputs, accepted, out, choice, pool, slots, records, held)

    def commit(accepted: Tensor) -> None:
        ops.commit(state=pool, records=records, held=held, slots=slots, accepted=accepted, backend=choice)

    def reset() -> None:
        poison(out, pool, records)
        held.fill_(2**31 - 1)
        pool.copy_(inputs.states)
        for n in range(cycle):
            leaving = every * (phase == n)
            if n:
                commit(leaving)
            step(every - leaving if n else every * 0)
        poison(out)

    def result() -> Expected:
        commit(every)
        return out, pool

    reset()
    return Bound(lambda: step(every), result, reset)


def _verified(
    inputs: Inputs,
    accepted: Tensor,
    out: Tensor,
    choice: Choice,
    pool: Tensor,
    slots: Tensor,
    records: Tensor | None = None,
    held: Tensor | None = None,
) -> None:
    """One verify step of all tokens."""
    ops.verify(
        *inputs.operands(),
        **inputs.options(),
        segments=inputs.segments,
        state=pool,
        slots=slots,
        accepted=accepted,
        records=records,
        held=held,
        out=out,
        backend=choice,
    )


def _pool(plan: Plan, inputs: Inputs) -> tuple[Tensor, Tensor, Callable[[Tensor], None], Callable[[], Tensor]]:
    """A pool with one spare row, its slots, how to reset it with an output buffer, and the states in order."""
    count = len(inputs.spans)
    pool = torch.empty((count + 1, *inputs.states.shape[1:]), dtype=plan.state_dtype, device=inputs.states.device)
    slots = torch.arange(count, 0, -1, dtype=torch.int32, device=pool.device)

    def reset(out: Tensor) -> None:
        poison(out, pool)
        pool[slots.long()] = inputs.states.to(pool.dtype)

    pool[slots.long()] = inputs.states.to(pool.dtype)
    return pool, slots, reset, lambda: pool[slots.long()]


@dataclass(frozen=True)
class Sample:
    """A few sequences and heads of a workload, on the host, packed: what is compared with float64."""

    inputs: Inputs
    rows: Tensor  # tokens of the workload that the sample holds
    sequences: list[int]
    heads: list[int]

    @staticmethod
    def of(whole: Inputs) -> Sample:
        count, value_heads = len(whole.spans), whole.v.shape[1]
        sequences = sorted({0, count // 2, count - 1})
        heads = sorted({0, value_heads - 1})
        group = value_heads // whole.q.shape[1]
        key_heads = [head // group for head in heads]
        rows = torch.cat([torch.arange(first, first + n) for first, n in (whole.spans[i] for i in sequences)])
        device_rows = rows.to(whole.q.device)
        q, k = (x[device_rows][:, key_heads].cpu() for x in (whole.q, whole.k))
        v, g, beta = (x[device_rows][:, heads].cpu() for x in (whole.v, whole.g, whole.beta))
        inputs = replace(
            whole,
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            segments=Segments.from_lengths([whole.spans[i][1] for i in sequences]),
            states=whole.states[sequences][:, heads].cpu(),
            A_log=None if whole.A_log is None else whole.A_log[heads].cpu(),
            dt_bias=None if whole.dt_bias is None else whole.dt_bias[heads].cpu(),
        )
        return Sample(inputs, rows, sequences, heads)

    def pick(self, out: Tensor, states: Tensor) -> Expected:
        """The sample's part of a result, on the host."""
        rows = self.rows.to(out.device)
        return out[rows][:, self.heads].cpu(), states[self.sequences][:, self.heads].cpu()
