"""Short, empty, ragged and padded sequences."""

from __future__ import annotations

import torch

from rapidkda import Segments, ops
from rapidkda.testing import Shape, activated, make_inputs, worst_output_error, worst_state_error

from .cases import case
from .guards import StatePool, all_zero, check_run, fail, run_prefill, same_bits, some_slots, within
from .target import Target

WEAK = -0.01
LENS = [1, 64, 1, 3, 17, 63, 65, 1]


@case("B16")
def shorter_than_a_chunk(target: Target) -> None:
    """One-token and short sequences in one batch with long ones; the one-token ones also through decode."""
    lens = [1, 16, 1, 3] if target.interpreted else LENS
    inputs = activated(lens, WEAK, dtype=target.dtype, device=target.device, seed=11, gaps=True)
    run = run_prefill(target, inputs)
    check_run(run, inputs, target.case_bar())
    ones = [n for n, length in enumerate(lens) if length == 1]
    slots = [run.slots[n] for n in ones]
    pool = StatePool(target, run.pool.view.shape[0], inputs)
    pool.put_states(slots, inputs.states[ones])
    first = [inputs.spans[n][0] for n in ones]
    out = target.decode(
        inputs,
        segments=Segments.from_lengths([1] * len(ones), target.device, first),
        state=pool.view,
        slots=target.index(slots),
    )
    want_out, want_states = inputs.expected()
    limit = target.case_bar()
    within("outputs of decode", worst_output_error(out, want_out, [(f, 1) for f in first]), limit.out)
    within("states of decode", worst_state_error(pool.states(slots), want_states[ones]), limit.state)
    pool.unchanged(slots)


@case("B17", regime=("slow", "fast"))
def dense_batch_with_a_tail(target: Target, regime: str) -> None:
    """A batch [2, T] with T no multiple of the chunk equals the same tokens packed; NaN follows the last row."""
    tokens = target.tokens(92)
    inputs = make_inputs(Shape("B17", (tokens, tokens), 2), regime, dtype=target.dtype, device=target.device)
    padded = []
    for operand in inputs.operands():
        memory = torch.full((2 * tokens + 40, *operand.shape[1:]), float("nan"), dtype=operand.dtype)
        memory = memory.to(target.device)
        memory[: 2 * tokens] = operand
        padded.append(memory[: 2 * tokens])
    batched = [x.unflatten(0, (2, tokens)) for x in padded]
    state = inputs.states.transpose(-1, -2).contiguous()
    options = {"initial_state": state, "output_final_state": True, **inputs.options()}
    dense, dense_state = ops.chunk_kda(*batched, **options, backend=target.name)[:2]
    packed, packed_state = target.chunk_kda(
        inputs, **options, cu_seqlens=torch.tensor([0, tokens, 2 * tokens], device=target.device)
    )[:2]
    same_bits("outputs, dense against packed", dense.flatten(0, 1), packed[0])
    same_bits("final states, dense against packed", dense_state, packed_state)
    want_out, want_states = inputs.expected()
    limit = target.case_bar()
    within("outputs", worst_output_error(packed[0], want_out, inputs.spans), limit.out)
    within("final states", worst_state_error(packed_state.transpose(-1, -2), want_states), limit.state)


@case("B19")
def same_call_same_bits(target: Target) -> None:
    """Tails of every size; the same call again and again gives the same bits."""
    lens = [target.tokens(n) for n in (67, 73, 78, 65, 127)][: 2 if target.interpreted else 5]
    inputs = activated(lens, WEAK, dtype=target.dtype, device=target.device, seed=19)
    first = run_prefill(target, inputs)
    check_run(first, inputs, target.case_bar())
    for _ in range(50 if target.device.type == "cuda" else 3):
        again = run_prefill(target, inputs)
        same_bits("outputs of a repeated call", again.out, first.out)
        same_bits("states of a repeated call", again.pool.storage, first.pool.storage)


@case(
    "B20", cu_seqlens=((0, 0, 5, 5, 69, 69), (0, 0, 0)), with_state=(True, False), state_dtype=("float32", "bfloat16")
)
def empty_sequences(target: Target, cu_seqlens: tuple[int, ...], with_state: bool, state_dtype: str) -> None:
    """An empty sequence leaves its state as it starts, bit for bit, even when every sequence is empty."""
    lens = [b - a for a, b in zip(cu_seqlens, cu_seqlens[1:])]
    if target.interpreted:
        lens = [min(n, 20) for n in lens]
    inputs = activated(lens, WEAK, dtype=target.dtype, device=target.device, seed=20)
    dtype = torch.bfloat16 if state_dtype == "bfloat16" else torch.float32
    initial = inputs.states.to(dtype) if with_state else None
    ends = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=target.device)
    out, final = target.chunk_kda(
        inputs, initial_state=initial, output_final_state=True, state_v_first=True, cu_seqlens=ends
    )[:2]
    started = inputs.states.to(dtype) if with_state else torch.zeros_like(inputs.states)
    empty = [n for n, length in enumerate(lens) if not length]
    same_bits("states of empty sequences", final[empty], started[empty])
    want_out, want_states = inputs.expected(states=started)
    limit = target.case_bar(final.dtype)
    within("outputs", worst_output_error(out[0], want_out, inputs.spans), limit.out)
    filled = [n for n, length in enumerate(lens) if length]
    within("final states", worst_state_error(final[filled], want_states[filled]), limit.state)
    if final.dtype != (dtype if with_state else torch.float32):
        fail(f"the final state must have the dtype of the initial one ({dtype}), got {final.dtype}")


@case("B20")
def no_tokens_and_no_segments(target: Target) -> None:
    """A step of nothing is legal and writes nothing."""
    inputs = activated([], dtype=target.dtype, device=target.device)
    pool = StatePool(target, 3, inputs)
    out = target.prefill(inputs, state=pool.view, slots=target.index([]))
    if out.shape != inputs.v.shape:
        fail(f"out must have shape {list(inputs.v.shape)}, got {list(out.shape)}")
    pool.unchanged()


@case("B21")
def empty_and_fresh_or_not_or_padding(target: Target) -> None:
    """Empty and fresh: the slot becomes zero. Empty and continued: unchanged. Padding: untouched."""
    inputs = activated([0, 5, 0, 0], WEAK, dtype=target.dtype, device=target.device)
    pool = StatePool(target, 9, inputs)
    pool.put_states([5], inputs.states[1:2])
    target.prefill(
        inputs,
        state=pool.view,
        slots=target.index([3, 5, 7, -1]),
        has_initial_state=target.index([False, True, True, False], torch.bool),
    )
    all_zero("slot of an empty fresh segment", pool.view[3])
    pool.unchanged([3, 5])


@case("B22")
def tokens_of_no_segment(target: Target) -> None:
    """Rows that no segment covers: zero in an output allocated here, left alone in the caller's."""
    inputs = activated([9, 4], WEAK, dtype=target.dtype, device=target.device, gaps=True)
    own = target.prefill(inputs)
    covered = torch.zeros(own.shape[0], dtype=torch.bool)
    for first, length in inputs.spans:
        covered[first : first + length] = True
    all_zero("rows of no segment", own[~covered.to(own.device)])
    run = run_prefill(target, inputs, fresh=[0, 1])
    check_run(run, inputs, target.case_bar())
    same_bits("covered rows", own[covered.to(own.device)], run.out[covered.to(own.device)])


@case("B61-B62", marker=(-1, 0, 77), op=("prefill", "decode", "slots", "replay", "deferred"))
def padding_rows(target: Target, marker: int, op: str) -> None:
    """Padding rows touch no state and their outputs are exactly zero, whatever the marker and the inputs are.

    A slot outside the pool is padding too. With marker -1, slot 0 is a real slot.
    """
    real = [5, 9, 2] if marker == 0 else [0, 5, 9]
    slots = [marker, real[0], marker, real[1], 40, real[2], marker, marker]
    rows = [n for n, slot in enumerate(slots) if slot in real]
    inputs = activated([1] * 8, WEAK, dtype=target.dtype, device=target.device, seed=61)
    pool = StatePool(target, 11, inputs)
    pool.put_states(real, inputs.states[rows])
    padding = [n for n in range(8) if n not in rows]
    for operand in (inputs.q, inputs.k, inputs.v):
        operand[padding] = float("nan")
    out = torch.full(inputs.v.shape, float("nan"), dtype=inputs.v.dtype, device=target.device)
    target.advance(op, inputs, state=pool.view, slots=target.index(slots), out=out, pad_slot=marker)
    all_zero("outputs of padding rows", out[padding])
    want_out, want_states = inputs.expected(sequences=rows)
    limit = target.case_bar()
    spans = [inputs.spans[n] for n in rows]
    within("outputs of real rows", worst_output_error(out, want_out, spans), limit.out)
    within("states of real rows", worst_state_error(pool.states(real), want_states), limit.state)
    pool.unchanged(real)


@case("B51")
def every_kind_of_row_in_one_prefill(target: Target) -> None:
    """A first chunk, a one-token continuation, a decode, four drafts and a padding row in one call, in any order."""
    lens = [target.tokens(65), 1, 1, 4, 1]
    inputs = activated(lens, WEAK, dtype=target.dtype, device=target.device, seed=51, layout="fused", gaps=True)
    slots = [7, 3, 10, 2, -1]
    pool = StatePool(target, 12, inputs)
    pool.put_states(slots[:4], inputs.states[:4])
    fresh = [True, False, False, False, False]
    out = torch.full(inputs.v.shape, float("nan"), dtype=inputs.v.dtype, device=target.device)
    target.prefill(
        inputs,
        state=pool.view,
        slots=target.index(slots, torch.int64),
        has_initial_state=target.index([not f for f in fresh], torch.bool),
        out=out,
    )
    starts = inputs.states.clone()
    starts[0] = 0.0
    want_out, want_states = inputs.expected(states=starts)
    limit = target.case_bar()
    within("outputs", worst_output_error(out, want_out, inputs.spans[:4]), limit.out)
    within("states", worst_state_error(pool.states(slots[:4]), want_states[:4]), limit.state)
    all_zero("outputs of the padding row", out[inputs.spans[4][0] : inputs.spans[4][0] + 1])
    pool.unchanged(slots[:4])


@case("batch")
def batch_mates_change_nothing(target: Target) -> None:
    """A sequence alone equals the same sequence in a batch, beyond rounding."""
    lens = [target.tokens(70), 33, 5]
    inputs = activated(lens, WEAK, dtype=target.dtype, device=target.device, seed=70)
    together = run_prefill(target, inputs)
    limit = target.case_bar()
    for n, (first, length) in enumerate(inputs.spans):
        segments = Segments.from_lengths([length], target.device, [first])
        pool = StatePool(target, 4, inputs)
        pool.put_states([2], inputs.states[n : n + 1])
        out = target.prefill(inputs, segments=segments, state=pool.view, slots=target.index([2]))
        within("outputs", worst_output_error(out, together.out.cpu().double(), [(first, length)]), 2 * limit.out)
        state = together.pool.states([together.slots[n]]).double().cpu()
        within("states", worst_state_error(pool.states([2]), state), 2 * limit.state)


@case("slots")
def read_and_write_slots_differ(target: Target) -> None:
    """A state is read from one slot and left in another; the first keeps its bits."""
    inputs = activated([20, 7], WEAK, dtype=target.dtype, device=target.device, seed=9)
    read, write = some_slots(2), [7, 6]
    pool = StatePool(target, 9, inputs)
    pool.put_states(read, inputs.states)
    target.prefill(inputs, state=pool.view, slots=target.index(write), read_slots=target.index(read))
    _, want = inputs.expected()
    within("final states", worst_state_error(pool.states(write), want), target.case_bar().state)
    pool.unchanged(write)
