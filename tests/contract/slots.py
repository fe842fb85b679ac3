"""What a slot held before: poison of earlier tenants, and the mean of has_initial_state."""

from __future__ import annotations

import torch

from rapidkda.testing import activated, worst_output_error, worst_state_error

from .cases import case
from .guards import StatePool, all_zero, check_run, run_prefill, same_bits, within
from .target import Target


@case("B68", flag_dtype=(torch.bool, torch.int32, torch.uint8))
def stale_slots(target: Target, flag_dtype: torch.dtype) -> None:
    """Slots hold NaN and the flags are [no, yes, no]: fresh segments start from zero by selection, not by a product."""
    lens = [3, target.tokens(64), 0]
    inputs = activated(lens, dtype=target.dtype, device=target.device, seed=68)
    run = run_prefill(target, inputs, fresh=[0, 2], poison=True)
    check_run(run, inputs, target.case_bar())
    all_zero("slot of the empty fresh segment", run.pool.view[run.slots[2]])
    flags = target.index([0, 1, 0], torch.int32).to(flag_dtype)
    run.pool.view[run.slots[0]] = float("nan")
    run.pool.put_states(run.slots[1:2], inputs.states[1:2])
    out = target.prefill(inputs, state=run.pool.view, slots=target.index(run.slots), has_initial_state=flags)
    same_bits(f"outputs with flags in {flag_dtype}", out, run.out)


@case("slots")
def two_segments_start_from_one_slot(target: Target) -> None:
    """A shared prefix: both read the same slot, each writes its own; the shared one keeps its bits."""
    inputs = activated([20, target.tokens(70)], dtype=target.dtype, device=target.device, seed=67)
    pool = StatePool(target, 9, inputs)
    pool.put_states([4], inputs.states[:1])
    out = target.prefill(inputs, state=pool.view, slots=target.index([7, 2]), read_slots=target.index([4, 4]))
    want_out, want = inputs.expected(states=inputs.states[[0, 0]])
    within("outputs", worst_output_error(out, want_out, inputs.spans), target.case_bar().out)
    within("states", worst_state_error(pool.states([7, 2]), want), target.case_bar().state)
    pool.unchanged([7, 2])


@case("B68")
def every_segment_fresh(target: Target) -> None:
    """No segment has a state, and the pool holds nothing but NaN."""
    inputs = activated([5, target.tokens(70), 1], dtype=target.dtype, device=target.device, seed=69)
    check_run(run_prefill(target, inputs, fresh=[0, 1, 2], poison=True), inputs, target.case_bar())


@case("B68")
def no_pool_at_all(target: Target) -> None:
    """Without a pool every segment starts from zero; the outputs are those of a fresh pool."""
    inputs = activated([5, target.tokens(70), 1], dtype=target.dtype, device=target.device, seed=69)
    run = run_prefill(target, inputs, fresh=[0, 1, 2])
    same_bits("outputs", target.prefill(inputs), run.out)
