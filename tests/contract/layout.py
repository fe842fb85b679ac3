"""State layouts, head dims and head counts: every axis must be the right one, which K == V cannot show."""

from __future__ import annotations

import torch

from rapidkda.testing import Shape, activated, make_inputs, worst_output_error, worst_state_error

from .cases import case
from .guards import StatePool, check_run, fail, run_prefill, same_bits, within
from .target import Target

WEAK = -0.01


@case("B26", tokens=(64, 130), dims=((128, 128), (64, 128), (128, 64)), v_first=(True, False))
def state_layout(target: Target, tokens: int, dims: tuple[int, int], v_first: bool) -> None:
    """Both layouts, with K != V, beyond the first chunk."""
    key_dim, value_dim = dims
    inputs = activated(
        [target.tokens(tokens)], WEAK, key_dim=key_dim, value_dim=value_dim, dtype=target.dtype, device=target.device
    )
    check_run(run_prefill(target, inputs, v_first=v_first), inputs, target.case_bar())


@case("B27", op=("prefill", "decode", "slots", "replay", "deferred"), v_first=(True, False))
def one_entry_of_the_state(target: Target, op: str, v_first: bool) -> None:
    """One entry (key 3, value 5) set: query 3 must read value 5, and nothing else."""
    inputs = activated([1], 0.0, heads=1, dtype=target.dtype, device=target.device)
    inputs.scale = 1.0
    for operand in inputs.operands():
        operand.zero_()
    inputs.q[0, 0, 3] = inputs.k[0, 0, 100] = 1.0
    pool = StatePool(target, 4, inputs, v_first=v_first)
    pool.view[2] = 0.0
    pool.view[(2, 0, 5, 3) if v_first else (2, 0, 3, 5)] = 1.0
    out = target.advance(op, inputs, state=pool.view, slots=target.index([2]), state_v_first=v_first)
    want = torch.zeros_like(out)
    want[0, 0, 5] = 1.0
    if not torch.equal(out, want):
        fail(f"out must be the unit vector 5, its largest entry is {int(out.abs().argmax())}")


@case("B29", op=("prefill", "decode", "slots", "replay", "deferred"))
def inputs_are_not_written(target: Target, op: str) -> None:
    """Called twice with the same tensors: inputs keep their bits and the results are bit-equal."""
    lens = [target.tokens(40), 17] if op == "prefill" else [1, 1]
    inputs = make_inputs(Shape("B29", tuple(lens), 2), "slow", dtype=target.dtype, device=target.device)
    before = inputs.clone()
    results = []
    for _ in range(2):
        pool = StatePool(target, 5, inputs)
        pool.put_states([3, 1], inputs.states)
        out = target.advance(op, inputs, state=pool.view, slots=target.index([3, 1]))
        results.append((out, pool.storage))
    for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"):
        same_bits(f"input {name}", getattr(inputs, name), getattr(before, name))
    same_bits("outputs of the second call", results[1][0], results[0][0])
    same_bits("pool after the second call", results[1][1], results[0][1])


@case("B29")
def initial_state_is_not_written(target: Target) -> None:
    """chunk_kda returns a new final state and leaves the initial one alone."""
    inputs = activated([20], WEAK, dtype=target.dtype, device=target.device)
    initial = inputs.states.clone()
    _, final = target.chunk_kda(inputs, initial_state=initial, output_final_state=True, state_v_first=True)[:2]
    same_bits("initial_state", initial, inputs.states)
    within("final state", worst_state_error(final, inputs.expected()[1]), target.case_bar().state)


@case("B32", regime=("slow", "unbounded"), heads=((2, 4), (1, 3)))
def grouped_values(target: Target, regime: str, heads: tuple[int, int]) -> None:
    """More value heads than key heads: value head j reads key head j // group; gate and beta have value heads."""
    shape = Shape("B32", (target.tokens(65), 20), heads[0], value_heads=heads[1])
    inputs = make_inputs(shape, regime, dtype=target.dtype, device=target.device, layout="fused")
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("B33-B34", dims=[(k, 128) for k in (16, 32, 48, 64, 80, 96, 160, 192, 256)] + [(128, 48), (5, 7), (256, 256)])
def every_head_dim(target: Target, dims: tuple[int, int]) -> None:
    """Any head dim either works or is refused with a reason; none runs and is wrong. Both gates."""
    for regime in ("slow", "unbounded"):
        shape = Shape("B33", (target.tokens(35), 3), 2, key_dim=dims[0], value_dim=dims[1])
        inputs = make_inputs(shape, regime, dtype=target.dtype, device=target.device)
        check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("B36-B37", heads=(1, 3, 6, 7, 12, 64))
def every_head_count(target: Target, heads: int) -> None:
    """Head counts that no launch table lists: everything is computed, nothing left over from before."""
    heads = min(heads, 7) if target.interpreted else heads
    inputs = make_inputs(Shape("B36", (20, 5), heads), "slow", dtype=target.dtype, device=target.device, seed=heads)
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("B97", state_dtype=(torch.float32, torch.bfloat16), v_first=(True, False))
def states_keep_their_dtype_and_layout(target: Target, state_dtype: torch.dtype, v_first: bool) -> None:
    """The final state comes back in the dtype and layout of the initial one."""
    inputs = activated([20, 3], WEAK, key_dim=128, value_dim=128, dtype=target.dtype, device=target.device)
    initial = inputs.states.to(state_dtype)
    started = initial.clone()
    if not v_first:
        initial = initial.transpose(-1, -2).contiguous()
    ends = torch.tensor([0, 20, 23], device=target.device)
    out, final = target.chunk_kda(
        inputs, initial_state=initial, output_final_state=True, state_v_first=v_first, cu_seqlens=ends
    )[:2]
    if final.dtype != state_dtype or final.shape != initial.shape:
        fail(f"final state must be {state_dtype} {list(initial.shape)}, got {final.dtype} {list(final.shape)}")
    want_out, want = inputs.expected(states=started)
    limit = target.case_bar(state_dtype)
    within("outputs", worst_output_error(out[0], want_out, inputs.spans), limit.out)
    got = final if v_first else final.transpose(-1, -2)
    within("final state", worst_state_error(got, want), limit.state)
