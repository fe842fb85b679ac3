"""Faults of padding, checkpoints, speculation, convolution, norm and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rapidkda import reference
from rapidkda.backends.torch import TorchBackend
from rapidkda.problem import CommitCall, ConvCall, DecodeCall, NormCall, PrefillCall, VerifyCall
from rapidkda.segments import Checkpoints, Segments

from .install import KDA, KdaCall, lengths, replaces, with_tokens, wraps


@wraps("prefill", "decode", caught_by=("B61",))
def padding_marker_wraps_to_the_last_slot(original: Any, call: Any) -> None:
    pool = call.final if isinstance(call, PrefillCall) else call.pool
    if pool is None or call.write_slots is None:
        return original(call)
    slots = torch.where(call.write_slots < 0, call.write_slots + pool.shape[0], call.write_slots)
    return original(replace(call, read_slots=slots, write_slots=slots, pad_slot=-(2**31)))


@wraps("prefill", "decode", caught_by=("B61",))
def slot_zero_always_taken_for_padding(original: Any, call: Any) -> None:
    original(replace(call, pad_slot=0))


@wraps("prefill", "decode", caught_by=("B62",))
def outputs_of_padding_not_written(original: Any, call: Any) -> None:
    before = call.out.clone()
    original(call)
    if call.write_slots is not None:
        for (first, length), slot in zip(zip(*call.segments.host_values()), call.write_slots.tolist()):
            if slot == call.pad_slot:
                call.out[first : first + length] = before[first : first + length]


@wraps("prefill", caught_by=("B22", "shapes"))
def rows_of_no_segment_zeroed(original: Any, call: PrefillCall) -> None:
    call.out.zero_()
    original(call)


@wraps("decode", caught_by=("decode-tokens_anywhere",))
def decode_rows_taken_for_tokens(original: Any, call: DecodeCall) -> None:
    original(replace(call, segments=Segments.equal(call.segments.count, 1)))


@wraps("prefill", caught_by=("B29",))
def outputs_written_over_v(original: Any, call: PrefillCall) -> None:
    original(call)
    call.tokens.v.copy_(call.out)


@wraps("prefill", caught_by=("B87",))
def workspace_overrun(original: Any, call: PrefillCall) -> None:
    original(call)
    if call.workspace is not None:
        past = call.workspace.as_strided((16,), (1,), call.workspace.storage_offset() + call.workspace.numel())
        past.zero_()


@wraps(*KDA, caught_by=("B32",))
def value_heads_interleaved(original: Any, call: KdaCall) -> None:
    heads = torch.arange(call.tokens.value_heads) % call.tokens.heads
    original(with_tokens(call, q=call.tokens.q[:, heads], k=call.tokens.k[:, heads]))


@wraps("prefill", caught_by=("B70",))
def final_state_stored_as_the_checkpoint(original: Any, call: PrefillCall) -> None:
    original(call)
    if call.checkpoints is not None and call.checkpoint_pool is not None and call.final is not None:
        begin, _, slot = call.checkpoints.host_values()
        for n in range(call.segments.count):
            row = n if call.write_slots is None else int(call.write_slots[n])
            for i in range(int(begin[n]), int(begin[n + 1])):
                call.checkpoint_pool[int(slot[i])] = call.final[row].to(call.checkpoint_pool.dtype)


@wraps("prefill", caught_by=("B71",))
def checkpoints_on_one_grid_over_the_batch(original: Any, call: PrefillCall) -> None:
    if call.checkpoints is None:
        return original(call)
    begin, offset, slot = call.checkpoints.host_values()
    first, _ = call.segments.host_values()
    entries = []
    for n in range(call.segments.count):
        for i in range(int(begin[n]), int(begin[n + 1])):
            on_grid = int((first[n] + offset[i]) // 16 * 16 - first[n]) // 16 * 16
            entries.append((n, max(16, on_grid), int(slot[i])))
    return original(replace(call, checkpoints=Checkpoints.build(entries, call.segments.count)))


@wraps("verify", "commit", caught_by=("B48", "verify"))
def accepted_off_by_one(original: Any, call: VerifyCall | CommitCall) -> None:
    original(replace(call, accepted=call.accepted - 1))


@wraps("verify", caught_by=("verify",))
def accepted_ignored(original: Any, call: VerifyCall) -> None:
    original(replace(call, accepted=torch.ones_like(call.accepted)))


@wraps("verify", caught_by=("B47",))
def accepted_not_clamped(original: Any, call: VerifyCall) -> None:
    if call.records is not None:
        return original(call)
    table = call.slots
    wide = table.as_strided((table.shape[0], table.shape[1] + 2), table.stride(), table.storage_offset() - 1)
    start = wide.gather(1, call.accepted.clamp(0, table.shape[1] + 1).long()[:, None])
    return original(replace(call, slots=torch.cat([start, table[:, 1:]], 1), accepted=torch.ones_like(call.accepted)))


@wraps("verify", caught_by=("B54",))
def drafts_committed_at_once(original: Any, call: VerifyCall) -> None:
    original(call)
    if call.records is not None:
        count = call.segments.length.to(call.accepted.dtype)
        whole = CommitCall(call.pool, call.records, None, call.slots, count, call.state_v_first, call.pad_slot)
        TorchBackend().commit(whole)


@wraps("commit", caught_by=("B60",))
def rejected_records_multiplied_by_zero(original: Any, call: CommitCall) -> None:
    records = call.records.clone()
    rows = call.slots.long()
    taken = torch.arange(records.shape[1]) < call.accepted[:, None]
    records[rows] = records[rows] * taken[:, :, None, None]
    original(replace(call, records=records, accepted=torch.full_like(call.accepted, records.shape[1])))


@wraps("verify", caught_by=("B50",))
def gates_taken_by_row_and_not_by_token(original: Any, call: VerifyCall) -> None:
    g = call.tokens.g.clone()
    packed = 0
    for first, length in zip(*call.segments.host_values()):
        g[first : first + length] = call.tokens.g[packed : packed + int(length)].nan_to_num(-0.5)
        packed += int(length)
    original(with_tokens(call, g=g))


@wraps("verify", caught_by=("B54", "verify"))
def state_after_the_last_draft_in_every_slot(original: Any, call: VerifyCall) -> None:
    original(call)
    if call.records is None:
        for n, length in enumerate(lengths(call)):
            for j in range(length - 1):
                call.pool[int(call.slots[n, j])] = call.pool[int(call.slots[n, length - 1])]


@wraps("conv", caught_by=("B82",))
def window_dropped_by_a_short_chunk(original: Any, call: ConvCall) -> None:
    original(call)
    taps = call.weight.shape[1]
    if call.pool is None or call.write_slots is None or call.keep_all:
        return
    for slot, length in zip(call.write_slots.tolist(), lengths(call)):
        if 0 < length < taps - 1 and slot != call.pad_slot:
            window = call.pool[slot] if call.channels_last else call.pool[slot].t()
            window[: taps - 1 - length] = 0.0


@wraps("conv", caught_by=("B68",))
def stale_window_of_a_fresh_segment(original: Any, call: ConvCall) -> None:
    original(replace(call, has_initial_state=None))


@wraps("conv", caught_by=("B48",))
def window_not_shifted_by_the_accepted(original: Any, call: ConvCall) -> None:
    original(replace(call, accepted=None))


@wraps("conv", caught_by=("B84", "B82"))
def rows_before_the_segment_leak_in(original: Any, call: ConvCall) -> None:
    original(call)
    taps = call.weight.shape[1]
    for n, (first, length) in enumerate(zip(*(x.tolist() for x in call.segments.host_values()), strict=True)):
        if call.pool is None or (call.has_initial_state is not None and not call.has_initial_state[n]):
            start = max(0, first - taps + 1)
            y, _ = reference.causal_conv(call.x[start : first + length], call.weight, call.bias, None, call.silu)
            call.out[first : first + length] = y[first - start :].to(call.out.dtype)


@wraps("conv", caught_by=("B70",))
def last_window_stored_as_the_checkpoint(original: Any, call: ConvCall) -> None:
    if call.checkpoints is None:
        return original(call)
    begin, _, slot = call.checkpoints.host_values()
    ends = [
        (n, lengths(call)[n] // 16 * 16) for n in range(call.segments.count) for _ in range(begin[n + 1] - begin[n])
    ]
    entries = [(n, end, int(row)) for (n, end), row in zip(ends, slot)]
    return original(replace(call, checkpoints=Checkpoints.build(entries, call.segments.count)))


@wraps("conv", caught_by=("conv",))
def taps_in_reverse(original: Any, call: ConvCall) -> None:
    original(replace(call, weight=call.weight.flip(1)))


@wraps("conv", caught_by=("conv",))
def bias_ignored(original: Any, call: ConvCall) -> None:
    original(replace(call, bias=None))


@wraps("conv", caught_by=("B48",))
def drafts_not_kept_in_the_window(original: Any, call: ConvCall) -> None:
    original(replace(call, keep_all=False))


@wraps("norm", caught_by=("B85-epsilon",))
def epsilon_ignored(original: Any, call: NormCall) -> None:
    original(replace(call, eps=1e-5))


@wraps("norm", caught_by=("B85",))
def silu_instead_of_the_sigmoid(original: Any, call: NormCall) -> None:
    original(replace(call, activation="silu"))


@wraps("norm", caught_by=("B85",))
def norm_over_all_heads(original: Any, call: NormCall) -> None:
    x, z = (t.flatten(1).unsqueeze(1) for t in (call.x, call.z))
    out = torch.empty_like(x)
    original(replace(call, x=x, z=z, weight=call.weight.repeat(call.x.shape[1]), out=out))
    call.out.copy_(out.view(call.out.shape))


@replaces(TorchBackend, "forward", caught_by=("gradients",))
def gate_bias_detached(original: Any, self: TorchBackend, tokens: Any, *args: Any) -> tuple[Tensor, Tensor]:
    gate = replace(tokens.gate, dt_bias=tokens.gate.dt_bias.detach())
    return original(self, replace(tokens, gate=gate), *args)
