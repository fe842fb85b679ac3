"""Calls inside CUDA graphs, and calls that must not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rapidkda import Segments
from rapidkda.bench.timing import launches
from rapidkda.testing import Inputs, activated

from .cases import case
from .guards import GuardedPool, StatePool, same_bits
from .target import NotHere, Target

BATCH = 4
OPERATORS = ("decode", "verify_slots", "verify_replay", "verify_deferred", "conv", "norm", "prefill")
LENGTHS = {"decode": 1, "conv": 1, "norm": 1, "prefill": 40}  # tokens of a request; a verification has 3
RECORDS = {"verify_replay": 3, "verify_deferred": 7}  # rows a slot


def gpu_only(target: Target) -> None:
    if target.device.type != "cuda":
        raise NotHere("needs a GPU")


class Step:
    """One call of an operator on static buffers, which a later step refills in place."""

    def __init__(self, target: Target, operator: str):
        self.target, self.operator = target, operator
        length = LENGTHS.get(operator, 3)
        self.inputs: Inputs = activated([length] * BATCH, dtype=target.dtype, device=target.device, seed=64)
        self.segments = Segments.equal(BATCH, length, target.device)
        self.pool = StatePool(target, 20, self.inputs)
        width = (RECORDS.get(operator, 0), 2, 2 * 128 + 128)
        self.records = GuardedPool(target, 20, width) if operator in RECORDS else None
        self.held = target.index([[0, 0]] * 20) if operator == "verify_deferred" else None
        self.windows = GuardedPool(target, 20, (64, 3), target.dtype)
        columns = 3 if operator == "verify_slots" else 1
        self.slots = target.index([[0] * columns] * BATCH)
        self.accepted = target.index([1] * BATCH)
        self.x = target.normal(BATCH, 64)
        self.weight = target.normal(64, 4, seed=1)
        self.norm_weight = target.normal(128, seed=2)
        self.out = torch.empty_like(self.x if operator == "conv" else self.inputs.v)

    def refill(self, step: int) -> None:
        """Other tokens, slots and accepted counts; the last row becomes padding in every second step."""
        for name in ("q", "k", "v", "beta"):
            getattr(self.inputs, name).copy_(getattr(self.inputs, name).roll(1, 0))
        self.x.copy_(self.x.roll(1, 0))
        order = torch.randperm(20, generator=torch.Generator().manual_seed(step))[: self.slots.numel()]
        slots = order.view_as(self.slots).clone()
        if step % 2:
            slots[-1] = -1
        self.slots.copy_(slots)
        self.accepted.copy_(torch.arange(BATCH) * step % 3 + 1)

    def run(self) -> None:
        target, first = self.target, self.slots[:, 0]
        options = {"segments": self.segments, "out": self.out}
        if self.operator == "decode":
            target.decode(self.inputs, state=self.pool.view, slots=first, **options)
        elif self.operator == "prefill":
            target.prefill(self.inputs, state=self.pool.view, slots=first, **options)
        elif self.operator == "conv":
            target.conv(self.x, self.weight, state=self.windows.view, slots=first, **options)
        elif self.operator == "norm":
            target.norm(self.inputs.v, self.inputs.v, self.norm_weight, out=self.out)
        else:
            records = None if self.records is None else self.records.view
            slots = first if self.records is not None else self.slots
            target.verify(
                self.inputs,
                state=self.pool.view,
                slots=slots,
                accepted=self.accepted,
                records=records,
                held=self.held,
                **options,
            )

    def memory(self) -> list[Tensor]:
        """All that the operator writes."""
        kept = [] if self.records is None else [self.records.storage]
        kept += [] if self.held is None else [self.held]
        return [self.out, self.pool.storage, self.windows.storage, *kept]

    def start_over(self) -> None:
        for n, buffer in enumerate(self.memory()):
            buffer.copy_(0.1 * self.target.normal(*buffer.shape, seed=n, dtype=torch.float32))


def trace(step: Step, call: Callable[[], None]) -> list[list[Tensor]]:
    """What eight refilled steps leave behind."""
    fresh = Step(step.target, step.operator)
    for name in ("q", "k", "v", "beta"):
        getattr(step.inputs, name).copy_(getattr(fresh.inputs, name))
    step.x.copy_(fresh.x)
    step.start_over()
    left = []
    for n in range(8):
        step.refill(n)
        call()
        left.append([buffer.clone() for buffer in step.memory()])
    return left


@case("B64", operator=OPERATORS)
def replayed_graph_equals_eager(target: Target, operator: str) -> None:
    """A captured call follows its buffers: tokens, slots, counts and padding change in place between replays."""
    gpu_only(target)
    step = Step(target, operator)
    eager = trace(step, step.run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    replayed = trace(step, graph.replay)
    for n, (want, got) in enumerate(zip(eager, replayed, strict=True)):
        for one, two in zip(want, got, strict=True):
            same_bits(f"memory after step {n}", two, one)


@case("B64")
def a_captured_call_makes_no_tables(target: Target) -> None:
    """A decode that brings no segments records what it launches, not what fills the table of its rows."""
    gpu_only(target)
    step = Step(target, "decode")
    step.start_over()
    step.refill(0)

    def run() -> None:
        target.decode(step.inputs, state=step.pool.view, slots=step.slots[:, 0], segments=None, out=step.out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    eager, replayed = (launches(call, target.device) for call in (run, graph.replay))
    if eager != replayed:
        raise AssertionError(f"a replay runs {replayed} kernels, an eager call {eager}")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@case("B67", operator=OPERATORS)
def a_warm_call_never_waits(target: Target, operator: str) -> None:
    """With host values in the segment table nothing is copied back from the device."""
    gpu_only(target)
    step = Step(target, operator)
    step.start_over()
    step.refill(0)
    step.run()
    with no_synchronisation():
        step.run()
