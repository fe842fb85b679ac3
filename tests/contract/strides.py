"""Strided operands, strided index tensors, padded pools: the caller's own memory is read and written."""

from __future__ import annotations

import torch

from rapidkda import ops
from rapidkda.testing import Shape, activated, make_inputs, relative_error, worst_output_error, worst_state_error

from .cases import case
from .guards import GAP, StatePool, check_run, run_prefill, same_bits, within
from .target import Target
from .verify import STATE_DTYPES

WEAK = -0.01


@case("strides", regime=("slow", "unbounded"))
def column_slices_equal_dense_copies(target: Target, regime: str) -> None:
    """Operands that are column slices of fused buffers give the bits of dense copies."""
    shape = Shape("slices", (target.tokens(70), 5), 2)
    dense = make_inputs(shape, regime, dtype=target.dtype, device=target.device)
    fused = make_inputs(shape, regime, dtype=target.dtype, device=target.device, layout="fused")
    one, two = run_prefill(target, dense), run_prefill(target, fused)
    check_run(two, fused, target.case_bar())
    same_bits("outputs", two.out, one.out)
    same_bits("pool", two.pool.storage, one.pool.storage)


@case("strides")
def strided_output(target: Target) -> None:
    """Outputs go into a column slice of a wider buffer, and only there."""
    inputs = activated([target.tokens(40), 3], WEAK, dtype=target.dtype, device=target.device)
    tokens, heads, dim = inputs.v.shape
    wide = torch.full((tokens, 3 * heads * dim), float("nan"), dtype=target.dtype, device=target.device)
    out = wide[:, heads * dim : 2 * heads * dim].unflatten(1, (heads, dim))
    run = run_prefill(target, inputs, out=out)
    check_run(run, inputs, target.case_bar())
    around = torch.cat([wide[:, : heads * dim], wide[:, 2 * heads * dim :]], dim=1)
    if not bool(torch.isnan(around).all()):
        raise AssertionError("memory beside the output slice was written")


@case("B42", batch=(1, 4), op=("prefill", "decode"), dtype=(torch.int32, torch.int64))
def slots_from_a_column_of_a_block_table(target: Target, batch: int, op: str, dtype: torch.dtype) -> None:
    """Slot ids are a column of a wider table; a one-row column reports contiguous and keeps its stride."""
    table = torch.full((batch, 9), 39, dtype=dtype)  # 39: a slot that must stay as it is
    table[:, 0] = torch.tensor([11, 4, 38, 20])[:batch]
    table = table.to(target.device)
    inputs = activated([1] * batch, WEAK, dtype=target.dtype, device=target.device, seed=42)
    slots = table[:, 0].tolist()
    pool = StatePool(target, 40, inputs)
    pool.put_states(slots, inputs.states)
    out = (target.prefill if op == "prefill" else target.decode)(inputs, state=pool.view, slots=table[:, 0])
    want_out, want = inputs.expected()
    limit = target.case_bar()
    within("outputs", worst_output_error(out, want_out, inputs.spans), limit.out)
    within("states", worst_state_error(pool.states(slots), want), limit.state)
    pool.unchanged(slots)


@case("B43")
def every_second_batch(target: Target) -> None:
    """A batch that is every second one of a buffer, in chunk_kda and fused_recurrent_kda."""
    tokens = target.tokens(40)
    inputs = activated([tokens] * 4, WEAK, dtype=target.dtype, device=target.device, seed=43)
    batched = [x.unflatten(0, (4, tokens))[::2] for x in inputs.operands()]
    initial = inputs.states[::2].transpose(-1, -2)
    want_out, want = inputs.expected(sequences=[0, 2])
    limit = target.case_bar()
    for function in (ops.chunk_kda, ops.fused_recurrent_kda):
        out, final = function(*batched, initial_state=initial, output_final_state=True, backend=target.name)[:2]
        got = torch.zeros(inputs.v.shape, dtype=out.dtype, device=out.device)
        got.unflatten(0, (4, tokens))[::2] = out
        within("outputs", worst_output_error(got, want_out, [inputs.spans[0], inputs.spans[2]]), limit.out)
        within("final states", worst_state_error(final.transpose(-1, -2), want), limit.state)


@case("B44")
def strided_lengths_states_and_gate(target: Target) -> None:
    """cu_seqlens is every second entry of a table, the initial state and the float32 gate have padded rows."""
    lens = [target.tokens(30), 11]
    inputs = activated(lens, WEAK, dtype=target.dtype, device=target.device, seed=44)
    wide = torch.full((6,), 99, dtype=torch.int64)
    wide[::2] = torch.tensor([0, lens[0], sum(lens)])
    cu_seqlens = wide.to(target.device)[::2]
    initial = torch.full((2, 2, 128, 256), float("nan"), device=target.device)
    initial[..., :128] = inputs.states
    gate = torch.full((sum(lens), 2, 256), float("nan"), device=target.device)
    gate[..., :128] = inputs.g
    inputs.g = gate[..., :128]
    out, final = target.chunk_kda(
        inputs, initial_state=initial[..., :128], output_final_state=True, state_v_first=True, cu_seqlens=cu_seqlens
    )[:2]
    want_out, want = inputs.expected()
    limit = target.case_bar()
    within("outputs", worst_output_error(out[0], want_out, inputs.spans), limit.out)
    within("final states", worst_state_error(final, want), limit.state)


@case("B46", op=("prefill", "decode", "slots", "replay", "deferred"))
def padded_pool_is_updated_in_place(target: Target, op: str) -> None:
    """Slots [5, 2, 7] of a pool whose slot stride is padded: the caller's memory changes there and only there."""
    slots = [5, 2, 7]
    inputs = activated([1, 1, 1], WEAK, dtype=target.dtype, device=target.device, seed=46)
    padded = StatePool(target, 9, inputs)
    padded.put_states(slots, inputs.states)
    if padded.view.stride(0) != padded.view[0].numel() + GAP:
        raise AssertionError("the pool of this check must be padded")
    dense = padded.view.clone()
    results = []
    for state in (padded.view, dense):
        results.append(target.advance(op, inputs, state=state, slots=target.index(slots)))
    want_out, want = inputs.expected()
    limit = target.case_bar()
    within("outputs", worst_output_error(results[0], want_out, inputs.spans), limit.out)
    within("states", worst_state_error(padded.states(slots), want), limit.state)
    same_bits("outputs, padded against dense pool", results[0], results[1])
    same_bits("states, padded against dense pool", padded.view.contiguous(), dense)
    padded.unchanged(slots)


@case("strides")
def beta_of_any_stride(target: Target) -> None:
    """beta may be transposed in memory: both of its strides are free."""
    inputs = activated([target.tokens(40)], WEAK, dtype=target.dtype, device=target.device)
    inputs.beta = inputs.beta.t().contiguous().t()
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case(
    "strides",
    op=("decode", "slots", "replay", "deferred", "deferred of eight"),
    far=(True, False),
    state_dtype=STATE_DTYPES,
)
def operands_that_start_anywhere(target: Target, op: str, far: bool, state_dtype: torch.dtype) -> None:
    """Rows of q, k, v, g, outputs, pools and records that start one element past an aligned address, and are an odd
    number of elements apart, give what dense ones give: a kernel may load them otherwise, and sum in another order."""
    lens = {"decode": [1, 1, 1], "deferred of eight": [8, 1, 5]}.get(op, [3, 1, 2])
    deferred = op.startswith("deferred")
    inputs = activated(lens, WEAK, dtype=target.dtype, device=target.device, seed=45)
    slots, width = [4, 1, 5], 2 * inputs.q.shape[2] + inputs.v.shape[2]
    results = []
    for spare in (0, 1):
        step = inputs.clone()
        for name in ("q", "k", "v", "g"):
            setattr(step, name, _moved(getattr(inputs, name), spare))
        out = _moved(torch.zeros_like(inputs.v), spare)
        empty = torch.zeros(7, *inputs.states.shape[1:], dtype=state_dtype, device=target.device)
        pool = _moved(empty, spare if far else 0)
        pool[slots] = inputs.states.to(state_dtype)
        options = {"segments": inputs.segments, "state": pool, "out": out}
        if op == "decode":
            target.decode(step, slots=target.index(slots), **options)
        elif op == "slots":
            table = target.index([[4, 0, 2], [1, 1, 1], [5, 3, 3]])  # of which no row names a slot of another
            target.verify(step, slots=table, accepted=target.index([1, 1, 1]), **options)
        else:
            heads, rows = inputs.v.shape[1], max(lens) + deferred
            records = _moved(torch.zeros(7, rows, heads, width, device=target.device), spare)
            kept = {"records": records, "slots": target.index(slots)}
            if deferred:  # as part of an engine's own buffer, it may start anywhere too
                kept["held"] = torch.zeros(7 * heads + spare, dtype=torch.int32, device=target.device)[spare:].view(
                    7, -1
                )
            for accepted in ([0, 0, 0], [2, 1, 1]):
                target.verify(step, accepted=target.index(accepted), **kept, **options)
            target.commit(state=pool, accepted=target.index([1, 0, 2]), **kept)
            results.append(records.contiguous())
        results += [out.contiguous(), pool.contiguous()]
    half = len(results) // 2
    for n, (dense, moved) in enumerate(zip(results[:half], results[half:], strict=True)):
        limit = 1e-5 if max(lens) < 8 else 2**-14  # operands of 16 bits in a kernel for aligned states alone
        exact = dense.dtype is state_dtype is torch.float32  # what was rounded may fall to either side
        within(f"result {n}", relative_error(moved, dense), limit if exact else 2**-8)


def _moved(x: torch.Tensor, spare: int) -> torch.Tensor:
    """A copy whose rows of the first dimension have `spare` elements before them."""
    rows = torch.zeros(x.shape[0], x[0].numel() + spare, dtype=x.dtype, device=x.device)
    view = rows[:, spare:].unflatten(1, tuple(x.shape[1:]))
    view.copy_(x)
    return view
