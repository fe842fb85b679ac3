"""Random steps against the reference: any lengths, places, slots, flags and padding, in one prefill call."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidkda import Segments
from rapidkda.errors import BackendUnavailable
from rapidkda.testing import Shape, make_inputs, worst_output_error, worst_state_error

from .guards import StatePool, all_zero, within
from .target import Target

ROWS = 12  # of the pool


@dataclass(frozen=True)
class Step:
    """One step of an engine: a segment a row, in the order of its slots."""

    lens: list[int]
    gaps: list[int]  # tokens of nobody before each segment
    order: list[int]  # segments by their place on the token axis
    read: list[int]
    write: list[int]
    starts: list[bool]
    padding: list[bool]
    regime: str
    seed: int


@st.composite
def steps(draw: st.DrawFn) -> Step:
    count = draw(st.integers(1, 5))
    lengths = st.one_of(st.integers(0, 3), st.sampled_from([15, 16, 17, 63, 64, 65]))

    def several(kind: st.SearchStrategy) -> list:  # type: ignore[type-arg]
        return draw(st.lists(kind, min_size=count, max_size=count))

    write = draw(st.permutations(range(ROWS)))[:count]
    own = several(st.booleans())
    spare = [row for row in range(ROWS) if row not in write]
    read = [w if mine else draw(st.sampled_from(spare)) for w, mine in zip(write, own, strict=True)]
    return Step(
        lens=several(lengths),
        gaps=several(st.integers(0, 2)),
        order=list(draw(st.permutations(range(count)))),
        read=read,
        write=list(write),
        starts=several(st.booleans()),
        padding=several(st.sampled_from([False, False, False, True])),
        regime=draw(st.sampled_from(["slow", "fast", "unbounded", "collinear"])),
        seed=draw(st.integers(0, 2**16)),
    )


@given(step=steps())
@settings(max_examples=40, deadline=None, derandomize=True)
def check(target: Target, step: Step) -> None:
    count, dims = len(step.lens), {"key_dim": 16, "value_dim": 24} if target.name == "torch" else {}
    first, position = [0] * count, 0
    for n in step.order:
        position += step.gaps[n]
        first[n], position = position, position + step.lens[n]
    total = position + 1
    shape = Shape("step", (total,), 1, **dims)
    inputs = make_inputs(shape, step.regime, dtype=target.dtype, device=target.device, seed=step.seed)
    pool = StatePool(target, ROWS, inputs)
    states = 0.1 * target.normal(ROWS, *inputs.states.shape[1:], seed=step.seed, dtype=torch.float32)
    pool.put_states(range(ROWS), states)
    out = torch.full(inputs.v.shape, float("nan"), dtype=inputs.v.dtype, device=target.device)
    slots = [-1 if pad else slot for slot, pad in zip(step.write, step.padding, strict=True)]
    inputs.segments = Segments.from_lengths(step.lens, target.device, first)
    target.prefill(
        inputs,
        state=pool.view,
        slots=target.index(slots),
        read_slots=target.index([-1 if pad else slot for slot, pad in zip(step.read, step.padding, strict=True)]),
        has_initial_state=target.index(step.starts, torch.bool),
        out=out,
    )
    inputs.spans = list(zip(first, step.lens, strict=True))
    wanted = [states[r] if s else torch.zeros_like(states[r]) for r, s in zip(step.read, step.starts, strict=True)]
    real = [n for n in range(count) if not step.padding[n]]
    want_out, want = inputs.expected(sequences=real, states=torch.stack(wanted))
    limit = target.case_bar()
    within("outputs", worst_output_error(out, want_out, [inputs.spans[n] for n in real]), limit.out)
    if real:
        got = pool.states([step.write[n] for n in real])
        within("states", worst_state_error(got, want), limit.state)
    pool.unchanged(step.write[n] for n in real)
    covered = torch.zeros(total, dtype=torch.bool)
    for n, (start, length) in enumerate(inputs.spans):
        covered[start : start + length] = True
        if step.padding[n]:
            all_zero("outputs of a padding segment", out[start : start + length])
    if not bool(torch.isnan(out[~covered.to(out.device)]).all()):
        raise AssertionError("rows of no segment were written")


def test_random_steps(backend: Target) -> None:
    if backend.interpreted:
        pytest.skip("too many calls for an interpreted kernel")
    try:
        check(backend)
    except BackendUnavailable as refused:
        if backend.name == "torch":
            raise
        pytest.skip(str(refused))
