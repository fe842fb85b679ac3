"""States exported at token offsets while a segment runs."""

from __future__ import annotations

import torch

from rapidkda import Checkpoints, Segments
from rapidkda.testing import Inputs, activated, worst_output_error, worst_state_error

from .cases import case
from .guards import StatePool, check_run, run_prefill, within
from .target import Target


def state_after(inputs: Inputs, n: int, tokens: int, start: torch.Tensor | None = None) -> torch.Tensor:
    """Float64 state [1, HV, V, K] of segment n after its first `tokens` tokens."""
    first, _ = inputs.spans[n]
    part = Inputs(
        *inputs.operands(),
        segments=Segments.from_lengths([tokens], inputs.q.device, [first]),
        states=inputs.states[n : n + 1] if start is None else start[None],
        raw_gate=False,
        raw_beta=False,
        raw_keys=False,
    )
    return part.expected()[1]


def run_and_check(
    target: Target,
    lens: list[int],
    entries: list[tuple[int, int]],
    export_dtype: torch.dtype,
    fresh: tuple[int, ...] = (),
    v_first: bool = True,
) -> None:
    """Export after (segment, offset) of `entries` to scattered rows; check each, and that nothing else changed."""
    inputs = activated(lens, dtype=target.dtype, device=target.device, seed=71, gaps=True)
    pool = StatePool(target, 2 * len(entries) + 2, inputs, export_dtype, v_first, poison=True)
    rows = [2 * ((i * 5 + 3) % len(entries)) + 1 if len(entries) % 5 else 2 * i + 1 for i in range(len(entries))]
    table = Checkpoints.build([(n, at, row) for (n, at), row in zip(entries, rows)], len(lens), target.device)
    run = run_prefill(target, inputs, checkpoints=table, checkpoint_pool=pool.view, fresh=fresh, v_first=v_first)
    check_run(run, inputs, target.case_bar())
    limit = target.case_bar(export_dtype).state
    for (n, at), row in zip(entries, rows, strict=True):
        want = state_after(inputs, n, at, run.starts[n])
        within(f"state of segment {n} after {at} tokens", worst_state_error(pool.states([row]), want), limit)
    pool.unchanged(rows)


@case("B70", export_dtype=(torch.float32, torch.bfloat16))
def several_in_a_segment(target: Target, export_dtype: torch.dtype) -> None:
    """Lengths 150, 64, 63 and 200 with a checkpoint every 64: two, one, none and three, each at its own token."""
    if target.interpreted:
        run_and_check(target, [40, 16, 15, 33], [(0, 16), (0, 32), (1, 16), (3, 16), (3, 32)], export_dtype)
        return
    entries = [(0, 64), (0, 128), (1, 64), (3, 64), (3, 128), (3, 192)]
    run_and_check(target, [150, 64, 63, 200], entries, export_dtype)


@case("B71")
def offsets_count_from_each_segment(target: Target) -> None:
    """Segments of 70 tokens: checkpoints lie on each segment's own grid, not on one over the batch."""
    lens, at = ([70] * 3, 64) if not target.interpreted else ([20] * 3, 16)
    run_and_check(target, lens, [(0, at), (1, at), (2, at)], torch.float32, fresh=(1,))


@case("B70", v_first=(True, False))
def finest_alignment(target: Target, v_first: bool) -> None:
    """Every multiple of 16, the last one at the very end of its segment, in both layouts."""
    entries = [(0, 16), (0, 32), (0, 48), (2, 16), (2, 32)]
    run_and_check(target, [48, 7, 33], entries, torch.float32, v_first=v_first)


@case("B70")
def continue_from_a_checkpoint(target: Target) -> None:
    """A prompt resumed from an exported state equals the prompt run at once."""
    tokens, at = (150, 128) if not target.interpreted else (40, 32)
    inputs = activated([tokens], dtype=target.dtype, device=target.device, seed=72)
    pool = StatePool(target, 4, inputs)
    table = Checkpoints.build([(0, at, 2)], 1, target.device)
    run = run_prefill(target, inputs, checkpoints=table, checkpoint_pool=pool.view)
    rest = Segments.from_lengths([tokens - at], target.device, [at])
    out = target.prefill(inputs, segments=rest, state=pool.view, slots=target.index([2]))
    want_out, want = inputs.expected(states=run.starts)
    limit = target.case_bar()
    within("outputs of the rest", worst_output_error(out, want_out, [(at, tokens - at)]), limit.out)
    within("final state", worst_state_error(pool.states([2]), want), limit.state)


@case("B70")
def padding_exports_nothing(target: Target) -> None:
    """A padding segment leaves its checkpoint rows alone."""
    inputs = activated([20, 20], dtype=target.dtype, device=target.device, seed=73)
    states, exports = StatePool(target, 4, inputs), StatePool(target, 4, inputs)
    states.put_states([2], inputs.states[1:])
    table = Checkpoints.build([(0, 16, 1), (1, 16, 3)], 2, target.device)
    target.prefill(
        inputs, state=states.view, slots=target.index([-1, 2]), checkpoints=table, checkpoint_pool=exports.view
    )
    within(
        "exported state", worst_state_error(exports.states([3]), state_after(inputs, 1, 16)), target.case_bar().state
    )
    exports.unchanged([3])
    states.unchanged([2])


@case("B70", chunk_size=(64, 32))
def intermediate_states_of_chunk_kda(target: Target, chunk_size: int) -> None:
    """return_intermediate_states: the state at the start of every chunk, per sequence, in the dtype of k."""
    lens = [130, 0, 64, 70] if not target.interpreted else [20, 0, 34]
    inputs = activated(lens, dtype=target.dtype, device=target.device, seed=74)
    ends = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device=target.device)
    initial = inputs.states.clone()
    *_, states = target.chunk_kda(
        inputs,
        initial_state=initial,
        state_v_first=True,
        cu_seqlens=ends,
        return_intermediate_states=True,
        chunk_size=chunk_size,
    )
    want = [state_after(inputs, n, at) for n, length in enumerate(lens) for at in range(0, length, chunk_size)]
    assert states.dtype == inputs.k.dtype
    limit = target.case_bar(torch.bfloat16 if target.dtype == torch.bfloat16 else torch.float32).state
    within("intermediate states", worst_state_error(states.flatten(0, 1), torch.cat(want)), limit)
