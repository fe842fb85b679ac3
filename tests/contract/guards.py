"""Guarded memory: pools whose unnamed rows must not change by a bit, and comparisons that say how far off they are.

Failures are raised, not asserted, so that the checks also hold under `python -O`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rapidkda.testing import Bar, Inputs, worst_output_error, worst_state_error

from .target import Target

GAP = 64  # elements between two slots of a pool


def fail(message: str) -> None:
    raise AssertionError(message)


def same_bits(what: str, got: Tensor, want: Tensor) -> None:
    """Equal bit for bit, NaN included."""
    if got.dtype != want.dtype or got.shape != want.shape:
        fail(f"{what}: {got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}")
    differs = (_bytes(got) != _bytes(want.to(got.device))).sum()
    if int(differs):
        gap = float((got.double() - want.to(got.device).double()).abs().nan_to_num(float("inf")).max())
        fail(f"{what}: {int(differs)} bytes differ, by up to {gap:.3g}")


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def within(what: str, error: float, limit: float) -> None:
    if not error <= limit:
        fail(f"{what}: relative error {error:.3g} above {limit:.3g}")


def all_zero(what: str, x: Tensor) -> None:
    if int(torch.count_nonzero(x)) or bool(torch.isnan(x).any()):
        fail(f"{what}: not exactly zero")


class GuardedPool:
    """Rows [S, ...] with a gap after each. Rows hold 1000 + row (or NaN) until something is put there."""

    def __init__(
        self, target: Target, rows: int, inner: Sequence[int], dtype: torch.dtype = torch.float32, poison: bool = False
    ):
        self.inner = tuple(inner)
        size = 1
        for extent in inner:
            size *= extent
        self.storage = torch.empty(rows, size + GAP, dtype=dtype, device=target.device)
        marks = 1000.0 + torch.arange(rows, device=target.device)
        self.storage.copy_(torch.full_like(marks, float("nan"))[:, None] if poison else marks[:, None])
        self.view = self.storage[:, :size].unflatten(1, self.inner)
        self.before = self.storage.clone()

    def unchanged(self, written: Iterable[int] = ()) -> None:
        """Every row but `written`, and every gap, holds the bits it held when it was last put there."""
        touched = set(written)
        kept = [row for row in range(self.storage.shape[0]) if row not in touched]
        same_bits("rows of the pool that nobody names", self.storage[kept], self.before[kept])
        gap = self.storage.shape[1] - GAP
        same_bits("memory between the slots", self.storage[:, gap:], self.before[:, gap:])


class StatePool(GuardedPool):
    """A pool of recurrent states, read and written V-first whatever its layout is."""

    def __init__(
        self,
        target: Target,
        rows: int,
        inputs: Inputs,
        dtype: torch.dtype = torch.float32,
        v_first: bool = True,
        poison: bool = False,
    ):
        heads, key_dim, value_dim = inputs.v.shape[1], inputs.q.shape[2], inputs.v.shape[2]
        matrix = (value_dim, key_dim) if v_first else (key_dim, value_dim)
        super().__init__(target, rows, (heads, *matrix), dtype, poison)
        self.v_first = v_first

    def put_states(self, slots: Sequence[int], states: Tensor) -> None:
        for slot, state in zip(slots, states, strict=True):
            self.view[slot] = (state if self.v_first else state.transpose(-1, -2)).to(self.view)
        self.before = self.storage.clone()

    def states(self, slots: Sequence[int]) -> Tensor:
        """States [n, HV, V, K], as stored."""
        rows = self.view[list(slots)]
        return rows if self.v_first else rows.transpose(-1, -2)


@dataclass(slots=True, eq=False)
class Run:
    """What a call left behind."""

    out: Tensor
    pool: StatePool
    slots: list[int]
    starts: Tensor  # float64 states that the segments really started from


def some_slots(count: int) -> list[int]:
    """Distinct slots that are never the identity, in no order, with free rows between and around."""
    return [1 + 2 * ((n * 3 + 1) % count) if count % 3 else 2 + 2 * ((n + 1) % count) for n in range(count)]


def run_prefill(
    target: Target,
    inputs: Inputs,
    *,
    state_dtype: torch.dtype = torch.float32,
    v_first: bool = True,
    fresh: Sequence[int] = (),
    poison: bool = False,
    out: Tensor | None = None,
    **options: object,
) -> Run:
    """Prefill all segments on a guarded pool, unequal slots, into an output that holds NaN.

    Segments in `fresh` have no initial state; their slots keep the marks (or NaN) of a previous tenant.
    """
    count = len(inputs.spans)
    slots = some_slots(count)
    pool = StatePool(target, 2 * count + 3, inputs, state_dtype, v_first, poison)
    kept = [n for n in range(count) if n not in set(fresh)]
    pool.put_states([slots[n] for n in kept], inputs.states[kept])
    starts = torch.zeros(inputs.states.shape, dtype=torch.float64)
    if kept:
        starts[kept] = pool.states([slots[n] for n in kept]).double().cpu()
    if out is None:
        out = torch.full(inputs.v.shape, float("nan"), dtype=inputs.v.dtype, device=target.device)
    result = target.prefill(
        inputs,
        state=pool.view,
        slots=target.index(slots),
        has_initial_state=target.index([n in kept for n in range(count)], torch.bool) if fresh else None,
        state_v_first=v_first,
        out=out,
        **options,
    )
    if result is not out:
        fail("prefill must return the out it was given")
    return Run(out, pool, slots, starts)


def check_run(run: Run, inputs: Inputs, limit: Bar, expected: tuple[Tensor, Tensor] | None = None) -> None:
    """Outputs and states against float64, and nothing else written."""
    want_out, want_states = inputs.expected(states=run.starts) if expected is None else expected
    within("outputs", worst_output_error(run.out, want_out, inputs.spans), limit.out)
    within("final states", worst_state_error(run.pool.states(run.slots), want_states), limit.state)
    run.pool.unchanged(run.slots)
    uncovered = torch.ones(inputs.v.shape[0], dtype=torch.bool)
    for first, length in inputs.spans:
        uncovered[first : first + length] = False
    if not bool(torch.isnan(run.out[uncovered.to(run.out.device)]).all()):
        fail("output rows that no segment covers were written")


def set_rows(inputs: Inputs, name: str, value: Tensor | float) -> None:
    """Fill an operand on every covered row; a tensor broadcasts over the tokens."""
    operand = getattr(inputs, name)
    for first, length in inputs.spans:
        here = operand[first : first + length]
        here.copy_((torch.tensor(value) if isinstance(value, float) else value).to(here).expand_as(here))
