"""Random schedules: whatever an engine does, every output and state equals the accepted tokens run one by one.

A hypothesis state machine plays the engine: up to 12 requests arrive, run prefill chunks, decodes and verifications in
any mixture and order, have any number of drafts accepted, are preempted to the host, dropped, restarted, restored from
checkpoints, and leave, while free slots, scratch and padding rows hold NaN. RAPIDKDA_TEST_STEPS sets the least number
of engine steps (default 2000).
"""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from rapidkda.serving import (
    BackendWish,
    ExportedState,
    Rollback,
    SlotsExhausted,
    StatePool,
    StepBatch,
    StepLimits,
    StepRequest,
    export_state,
    import_state,
)
from rapidkda.testing.tolerances import bar, relative_error

from .oracle import (
    HIDDEN,
    Oracle,
    State,
    changed_slots,
    make_layer,
    make_workspace,
    resting_state,
    snapshot,
    wish_or_skip,
)

MAX_REQUESTS = 12
LIMITS = StepLimits(max_tokens=256, max_requests=MAX_REQUESTS)
NORM_EPS = 1e-3  # of the size of a single token's squared output, see `output_error`
CHOICES = st.randoms(use_true_random=True)  # one seed a step: what the engine decides in it
STEPS_A_RUN = 60
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # shrinking takes minutes: add it to look into a failure


@dataclass
class Life:
    """The engine's view of a request, and the oracle's."""

    state: State
    slots: tuple[int, ...] = ()
    fresh: bool = True
    open_states: list[State] = field(default_factory=list)  # after each token of a verify step still open
    parked: ExportedState | None = None
    restore_from: str | None = None


def output_error(got: Tensor, wanted: Tensor, row_norm: float) -> float:
    """Relative error, where a row that is small by cancellation counts as one of the layer's typical size.

    A single token's output is q . k times v: for near-orthogonal q and k float32 has few digits of it left, whoever
    computes it, and the norm after it would blow them up to a row of full size.
    """
    scale = wanted.norm(dim=1).clamp_min(row_norm).norm()
    return float((got.double() - wanted).norm() / scale) if len(wanted) else 0.0


class Engine(RuleBasedStateMachine):
    """One run: a pool, a layer, and the requests of a moment."""

    steps = 0  # of all runs
    rollback: Rollback = "replay"
    speculates = True
    backends = BackendWish(prefill="torch", decode="torch")
    device = "cpu"
    dtype = torch.float32
    dim = 16
    output_bar = bar("slow", torch.float32).out
    state_bar = bar("slow", torch.float32).state

    @initialize(
        max_drafts=st.integers(1, 4),
        more_rows=st.sampled_from([None, 0, 1, 3]),
        pad_slot=st.sampled_from([-1, 0]),
        bounded=st.booleans(),
        channels_last=st.booleans(),
        spare=st.integers(1, 10),
        arrivals=st.integers(1, MAX_REQUESTS),
        seed=st.integers(0, 2**16),
    )
    def start(
        self,
        max_drafts: int,
        more_rows: int | None,
        pad_slot: int,
        bounded: bool,
        channels_last: bool,
        spare: int,
        arrivals: int,
        seed: int,
    ) -> None:
        self.layer = make_layer(
            seed,
            lower_bound=-5.0 if bounded else None,
            eps=NORM_EPS,
            dim=self.dim,
            dtype=self.dtype,
            device=self.device,
            backends=self.backends,
        )
        self.oracle = Oracle(self.layer)
        self.generator = torch.Generator().manual_seed(seed)
        sample, _ = self.oracle.run(self.inputs(64), self.oracle.fresh())
        self.row_norm = float(sample.norm(dim=1).mean())
        rows = None if more_rows is None else 1 + max_drafts + more_rows
        if not self.speculates:
            max_drafts, rows = 0, 2 + (more_rows or 0)
        shape = self.layer.state_shape(max_drafts, self.rollback, record_rows=rows, conv_channels_last=channels_last)
        slots = arrivals * shape.slots_per_request + spare
        self.pool = StatePool(shape, slots, device=self.device, pad_slot=pad_slot, on_reuse="poison")
        self.pool.fill(range(slots), float("nan"))
        self.batch = StepBatch(self.pool, LIMITS)
        self.workspace = make_workspace(self.layer, self.pool, LIMITS, device=self.device)
        self.requests: dict[str, Life] = {}
        self.checkpoints: dict[str, State] = {}
        self.names = 0
        for _ in range(arrivals):
            self.arrive(reuse=False)

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, HIDDEN, generator=self.generator).to(self.device, self.dtype)

    def running(self) -> list[str]:
        return [name for name, request in self.requests.items() if request.slots]

    @rule(reuse=st.booleans())
    def arrive(self, reuse: bool) -> None:
        if len(self.requests) >= MAX_REQUESTS:
            return
        self.names += not reuse  # a request may come back under the name of one that left
        name = f"r{self.names}"
        if name in self.requests:
            return
        try:
            slots = self.pool.allocate(name)
        except SlotsExhausted:
            return
        self.requests[name] = Life(self.oracle.fresh(), slots)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self.requests.pop(name).slots:
            self.pool.free(name)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), keep=st.booleans())
    def preempt(self, data: st.DataObject, keep: bool) -> None:
        """Give up the slots; the state goes to the host, or is dropped and computed again."""
        name = data.draw(st.sampled_from(self.running()))
        request = self.requests[name]
        if keep and not request.fresh and request.restore_from is None:
            request.parked = export_state(self.pool, request.slots, len(request.open_states))
        else:
            request.state, request.fresh, request.open_states = self.oracle.fresh(), True, []
            request.restore_from = None
        self.pool.free(name)
        request.slots = ()

    @precondition(lambda self: len(self.running()) < len(self.requests))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.requests) - set(self.running()))))
        request = self.requests[name]
        try:
            request.slots = self.pool.allocate(name)
        except SlotsExhausted:
            return
        if request.parked is not None:
            for _ in range(2):  # twice is as good as once
                import_state(self.pool, request.slots, request.parked, name)
            request.parked = None

    @precondition(lambda self: self.running() and self.checkpoints)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """Send a request back to a checkpoint: its next step reads that slot."""
        request = self.requests[data.draw(st.sampled_from(self.running()))]
        name = data.draw(st.sampled_from(sorted(self.checkpoints)))
        request.restore_from, request.state = name, self.checkpoints[name]
        request.fresh, request.open_states = False, []

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.checkpoints)))
        if any(request.restore_from == name for request in self.requests.values()):
            return
        del self.checkpoints[name]
        self.pool.free(name)

    @precondition(lambda self: self.running())
    @rule(choices=CHOICES)
    def step(self, choices: random.Random) -> None:
        self.run_step(choices)

    @precondition(lambda self: self.running())
    @rule(choices=CHOICES)
    def another_step(self, choices: random.Random) -> None:
        """Steps are the most frequent thing that happens."""
        self.run_step(choices)

    def run_step(self, choices: random.Random) -> None:
        order = self.running()
        choices.shuffle(order)
        records: list[StepRequest] = []
        for name in order:
            action = choices.choice(["idle", "prefill", "decode", "decode", "verify", "verify", "verify"])
            if action != "idle":
                records.append(self.record(name, action, choices))
            if choices.random() < 0.1:
                records.append(StepRequest.padding(choices.randint(1, 3)))
        tokens = sum(record.num_tokens for record in records)
        hidden = self.inputs(tokens + 2)
        self.batch.fill(records, num_tokens=tokens + 2)
        assert self.batch.plan is not None
        for start, stop in self.batch.plan.padding:
            hidden[start:stop] = float("nan")
        self.workspace.fill(255)
        before = snapshot(self.pool)
        out = self.layer(hidden, self.batch, self.pool, self.workspace)
        Engine.steps += bool(records)
        assert changed_slots(self.pool, before) <= set(self.batch.plan.writers)
        for start, stop in self.batch.plan.padding:
            assert (out[start:stop] == 0).all()
        first = 0
        for record in records:
            if record.kind != "padding":
                self.judge(record, hidden[first : first + record.num_tokens], out[first : first + record.num_tokens])
            first += record.num_tokens

    def record(self, name: str, action: str, choices: random.Random) -> StepRequest:
        request = self.requests[name]
        accepted = 0
        if request.open_states:
            accepted = choices.randint(1, len(request.open_states))
            request.state, request.open_states = request.open_states[accepted - 1], []
        if request.fresh or (request.restore_from is not None and action == "verify"):
            action = "prefill"
        if action == "prefill":
            count = choices.choice([0, 1, 2, 3, 5, 15, 16, 17, 18, 20])
        else:
            count = 1 if action == "decode" else choices.randint(1, 1 + self.pool.shape.max_drafts)
        taken: list[tuple[int, int]] = []
        if count >= 16 and len(self.checkpoints) < 3 and choices.random() < 0.5:
            checkpoint = f"checkpoint {Engine.steps} {name}"
            with contextlib.suppress(SlotsExhausted):
                taken.append((16, self.pool.allocate(checkpoint, 1)[0]))
                self.checkpoints[checkpoint] = request.state  # replaced once the step has run
        read_slot = None
        if request.restore_from is not None:
            assert self.pool.slots is not None
            read_slot = self.pool.slots.slots_of(request.restore_from)[0]
        return StepRequest(
            name,
            action,  # type: ignore[arg-type]
            count,
            request.slots,
            has_initial_state=not request.fresh,
            accepted=accepted,
            read_slot=read_slot,
            checkpoints=tuple(taken),
        )

    def judge(self, record: StepRequest, hidden: Tensor, out: Tensor) -> None:
        request = self.requests[record.request_id]  # type: ignore[index]
        wanted, states = self.oracle.run(hidden, request.state)
        assert output_error(out, wanted, self.row_norm) <= self.output_bar
        request.fresh, request.restore_from = False, None
        for offset, slot in record.checkpoints:
            assert self.pool.slots is not None
            self.checkpoints[self.pool.slots.owner_of(slot)] = states[offset - 1]  # type: ignore[index]
            self.judge_state(slot, states[offset - 1])
        if record.kind == "verify":
            request.open_states = states
        elif states:
            request.state = states[-1]

    def judge_state(self, slot: int, wanted: State) -> None:
        got = resting_state(self.pool, slot)
        for name in ("recurrent", "history"):
            left, right = getattr(got, name), getattr(wanted, name)
            if right.any():
                assert relative_error(left, right) <= self.state_bar, name
            else:
                assert not left.any(), name

    @invariant()
    def settled_states_match(self) -> None:
        for request in getattr(self, "requests", {}).values():
            if request.slots and not request.fresh and not request.open_states and request.restore_from is None:
                self.judge_state(request.slots[0], request.state)


class ReplayEngine(Engine):
    rollback = "replay"


class SlotsEngine(Engine):
    rollback = "slots"


class DeferringEngine(Engine):
    """Without drafts: decodes are verifications of one token whose states are deferred, and ordinary ones."""

    speculates = False


def run(machine: type[Engine], steps: int) -> None:
    """Run engines until they have taken that many steps."""
    Engine.steps = 0
    while Engine.steps < steps:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max(4, (steps - Engine.steps) // 25),
                stateful_step_count=STEPS_A_RUN,
                deadline=None,
                phases=PHASES,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.mark.parametrize(("machine", "share"), [(ReplayEngine, 2), (SlotsEngine, 2), (DeferringEngine, 4)])
def test_any_schedule_equals_the_accepted_tokens_in_order(machine: type[Engine], share: int) -> None:
    run(machine, int(os.environ.get("RAPIDKDA_TEST_STEPS", "2000")) // share)


def half_precision(machine: type[Engine], backends: BackendWish, device: str, dim: int) -> type[Engine]:
    """The machine in bfloat16: projections, convolution, KDA, norm and output each round once to 2^-9."""
    fields = {
        "backends": backends,
        "device": device,
        "dtype": torch.bfloat16,
        "dim": dim,
        "output_bar": 2e-2,
        "state_bar": 2e-2,
    }
    return type(f"{backends.prefill}{machine.__name__}", (machine,), fields)


@pytest.mark.parametrize("machine", [ReplayEngine, SlotsEngine, DeferringEngine])
def test_any_schedule_in_half_precision(machine: type[Engine]) -> None:
    run(half_precision(machine, Engine.backends, "cpu", 32), 100)


@pytest.mark.gpu
@pytest.mark.parametrize("machine", [ReplayEngine, SlotsEngine, DeferringEngine])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_any_schedule_on_a_gpu(machine: type[Engine], backend: str) -> None:
    backends = wish_or_skip(backend, "cuda", 128, ("bounded", "softplus"))
    run(half_precision(machine, backends, "cuda", 128), 200)
