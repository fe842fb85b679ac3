"""Decode: one token a row, in place."""

from __future__ import annotations

import torch

from rapidkda import Segments
from rapidkda.testing import REGIMES, Bar, Inputs, Shape, activated, make_inputs, worst_output_error, worst_state_error

from .cases import case
from .guards import StatePool, some_slots, within
from .target import Target


@case("decode", regime=REGIMES, dtype=(torch.float32, torch.bfloat16, torch.float16))
def every_regime_of_one_step(target: Target, regime: str, dtype: torch.dtype) -> None:
    """One step from a filled state, in every gate regime and dtype, from strided slices."""
    shape = Shape("decode", (1,) * (2 if target.interpreted else 5), 2)
    inputs = make_inputs(shape, regime, dtype=dtype, device=target.device, layout="fused")
    check_step(target, inputs, target.bar(regime, dtype))


def check_step(
    target: Target, inputs: Inputs, limit: Bar, state_dtype: torch.dtype = torch.float32, v_first: bool = True
) -> None:
    """One step on a guarded pool against float64."""
    count = len(inputs.spans)
    slots = some_slots(count)
    pool = StatePool(target, 2 * count + 3, inputs, state_dtype, v_first)
    pool.put_states(slots, inputs.states)
    starts = pool.states(slots).clone()
    out = target.decode(inputs, state=pool.view, slots=target.index(slots), state_v_first=v_first)
    want_out, want = inputs.expected(states=starts)
    within("outputs", worst_output_error(out, want_out, inputs.spans), limit.out)
    within("states", worst_state_error(pool.states(slots), want), limit.state)
    pool.unchanged(slots)


@case("decode", dims=((128, 128), (64, 128), (128, 64)), v_first=(True, False), state_dtype=("float32", "bfloat16"))
def layouts_and_state_dtypes(target: Target, dims: tuple[int, int], v_first: bool, state_dtype: str) -> None:
    """Both layouts, K != V, grouped values, both state dtypes."""
    shape = Shape("decode", (1, 1, 1), 2, value_heads=4, key_dim=dims[0], value_dim=dims[1])
    inputs = make_inputs(shape, "slow", dtype=target.dtype, device=target.device)
    kind = getattr(torch, state_dtype)
    check_step(target, inputs, target.case_bar(kind), kind, v_first)


@case("decode", batch=(1, 2, 65))
def batch_sizes(target: Target, batch: int) -> None:
    """One row, and more rows than a block holds."""
    rows = min(batch, 3) if target.interpreted else batch
    inputs = make_inputs(Shape("decode", (1,) * rows, 3), "slow", dtype=target.dtype, device=target.device)
    check_step(target, inputs, target.case_bar())


@case("decode")
def tokens_anywhere_on_the_axis(target: Target) -> None:
    """Rows name their token; empty rows and tokens of no row are left alone; read and write slots may differ."""
    inputs = activated([1] * 6, dtype=target.dtype, device=target.device, seed=4)
    segments = Segments.from_lengths([1, 0, 1, 1], target.device, [5, 0, 2, 0])
    read, write = [2, 4, 8, 6], [3, 5, 8, 1]
    pool = StatePool(target, 10, inputs)
    pool.put_states(read, inputs.states[:4])
    out = torch.full(inputs.v.shape, float("nan"), dtype=inputs.v.dtype, device=target.device)
    target.decode(
        inputs,
        segments=segments,
        state=pool.view,
        slots=target.index(write),
        read_slots=target.index(read),
        out=out,
    )
    tokens, rows = [5, 2, 0], [0, 2, 3]
    starts = torch.zeros_like(inputs.states)
    starts[tokens] = inputs.states[rows]
    want_out, want = inputs.expected(states=starts)
    limit = target.case_bar()
    within("outputs", worst_output_error(out, want_out, [(t, 1) for t in tokens]), limit.out)
    within("states", worst_state_error(pool.states([write[r] for r in rows]), want[tokens]), limit.state)
    if not bool(torch.isnan(out[[1, 3, 4]]).all()):
        raise AssertionError("outputs of tokens that no row names were written")
    pool.unchanged([write[r] for r in rows])


@case("B13", slow_when_interpreted=True)
def two_thousand_steps(target: Target) -> None:
    """Rounding does not pile up over 2048 steps of hardly any decay with a float32 pool."""
    steps, dim = 2048, 64 if target.name == "torch" else 128
    options = {"heads": 1, "key_dim": dim, "value_dim": dim, "seed": 13}
    inputs = activated([steps], -0.0005, dtype=target.dtype, device=target.device, **options)
    inputs.beta *= 0.05
    pool = StatePool(target, 3, inputs)
    pool.put_states([1], inputs.states)
    slots = target.index([1])
    one = Segments.from_lengths([1], target.device)
    step = inputs.clone()
    for t in range(steps):
        for name in ("q", "k", "v", "g", "beta"):
            setattr(step, name, getattr(inputs, name)[t : t + 1])
        target.decode(step, segments=one, state=pool.view, slots=slots)
    _, want = inputs.expected()
    within("state after 2048 steps", worst_state_error(pool.states([1]), want), 1e-3)
    pool.unchanged([1])


@case("B59")
def a_few_tokens_continue_a_filled_state(target: Target) -> None:
    """After a prefill, three tokens in one call equal three calls of one token, and the reference."""
    first, more = target.tokens(50), 3
    whole = activated([first + more], dtype=target.dtype, device=target.device, seed=59)
    want_out, want = whole.expected()
    limit = target.case_bar()
    for pieces in ([first, more], [first, 1, 1, 1]):
        pool = StatePool(target, 4, whole)
        pool.put_states([2], whole.states)
        done = 0
        for n, piece in enumerate(pieces):
            segments = Segments.from_lengths([piece], target.device, [done])
            run = target.decode if n and piece == 1 else target.prefill
            out = run(whole, segments=segments, state=pool.view, slots=target.index([2]))
            within(f"outputs of piece {n}", worst_output_error(out, want_out, [(done, piece)]), limit.out)
            done += piece
        within("state", worst_state_error(pool.states([2]), want), limit.state)
