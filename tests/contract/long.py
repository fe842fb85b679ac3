"""Sequences long enough that a backend may cut them, and steps whose lengths differ widely."""

from __future__ import annotations

import torch

from rapidkda import Checkpoints
from rapidkda.testing import Shape, activated, make_inputs, worst_state_error

from .cases import case
from .checkpoints import state_after
from .guards import StatePool, check_run, run_prefill, same_bits, within
from .target import Target


def long(target: Target, on_gpu: int, elsewhere: int) -> int:
    return target.tokens(on_gpu if target.device.type == "cuda" else elsewhere)


@case("long", slow_when_interpreted=True, regime=("fast", "slow", "collinear", "staggered", "unbounded"))
def one_long_sequence(target: Target, regime: str) -> None:
    """One sequence with few heads, where a GPU is filled only by cutting it: exact whatever the gates are."""
    shape = Shape("long", (long(target, 4200, 1100),), 1)
    inputs = make_inputs(shape, regime, dtype=target.dtype, device=target.device, seed=95)
    check_run(run_prefill(target, inputs), inputs, target.bar(regime))


@case("long", slow_when_interpreted=True, fresh=((), (0,), (1, 2)))
def long_among_short_ones(target: Target, fresh: tuple[int, ...]) -> None:
    """A long sequence beside short, empty and fresh ones, scattered over the token axis."""
    shape = Shape("uneven", (17, long(target, 2500, 700), 0, 1, 130), 2)
    inputs = make_inputs(shape, "slow", dtype=target.dtype, device=target.device, seed=96, layout="fused", gaps=True)
    check_run(run_prefill(target, inputs, fresh=fresh, poison=True), inputs, target.case_bar())


@case("long", slow_when_interpreted=True)
def checkpoints_of_a_long_sequence(target: Target) -> None:
    """Exports before, at and after the places where a long sequence may be cut."""
    tokens = long(target, 2500, 700)
    inputs = activated([tokens], -0.003, heads=1, dtype=target.dtype, device=target.device, seed=97)
    offsets = sorted({16, tokens // 3 // 16 * 16, tokens // 2 // 64 * 64, tokens // 16 * 16})
    pool = StatePool(target, len(offsets) + 2, inputs, poison=True)
    entries = [(0, offset, row) for row, offset in enumerate(offsets, start=1)]
    table = Checkpoints.build(entries, 1, target.device)
    run = run_prefill(target, inputs, checkpoints=table, checkpoint_pool=pool.view)
    check_run(run, inputs, target.case_bar())
    for _, offset, row in entries:
        want = state_after(inputs, 0, offset)
        within(f"state after {offset} tokens", worst_state_error(pool.states([row]), want), target.case_bar().state)


@case("long", slow_when_interpreted=True, strength=(0.5, 2.0))
def one_open_channel_among_closed(target: Target, strength: float) -> None:
    """One channel forgets nothing, all others do at once: what it holds is read to the end, in this head only."""
    tokens, channel = long(target, 2500, 700), 77
    decay = torch.full((tokens, 2, 128), -8.0, device=target.device)
    decay[:, 0, channel] = 0.0
    inputs = activated([tokens], decay, dtype=target.dtype, device=target.device, seed=98)
    inputs.raw_keys = True
    inputs.beta.fill_(strength)
    inputs.k[..., channel] = 0.0
    inputs.q[..., channel] = 0.3
    inputs.states[..., channel] *= 1e3
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("B77", slow_when_interpreted=True)
def short_and_empty_segments_repeated(target: Target) -> None:
    """Many segments of 0, 1, 16 and 64 tokens over pools with old contents: the same bits every time."""
    lens = [0, 16, 0, 1, 64] * (8 if target.device.type == "cuda" else 2)
    inputs = activated(lens, dtype=target.dtype, device=target.device, seed=77)
    first = run_prefill(target, inputs)
    check_run(first, inputs, target.case_bar())
    for _ in range(200 if target.device.type == "cuda" else 2):
        again = run_prefill(target, inputs)
        same_bits("outputs", again.out, first.out)
        same_bits("pool", again.pool.storage, first.pool.storage)


@case("B80", slow_when_interpreted=True)
def strong_and_weak_gates_side_by_side(target: Target) -> None:
    """Neighbouring stretches of 64 tokens with log decay -5 and -0.001, many of them, the same bits every time."""
    tokens = long(target, 8192, 1024)
    weak = (torch.arange(tokens, device=target.device) // 64 % 2).bool()
    decay = torch.where(weak, -0.001, -5.0)[:, None, None].expand(tokens, 2, 128)
    inputs = activated([tokens], decay, dtype=target.dtype, device=target.device, seed=80)
    first = run_prefill(target, inputs)
    check_run(first, inputs, target.case_bar())
    for _ in range(20 if target.device.type == "cuda" else 1):
        again = run_prefill(target, inputs)
        same_bits("outputs", again.out, first.out)
        same_bits("pool", again.pool.storage, first.pool.storage)
