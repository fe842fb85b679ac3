"""Faults of states: carried, laid out, addressed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rapidkda.problem import DecodeCall, PrefillCall, VerifyCall
from rapidkda.segments import Segments

from .install import lengths, with_tokens, wraps


def _second_part(call: PrefillCall, change: Callable[[Tensor], Tensor], original: Any, tokens: int = 64) -> None:
    """Run everything right, then the tokens from `tokens` on again from a changed state."""
    first, length = call.segments.host_values()
    device = call.tokens.q.device
    head = Segments.from_lengths([min(n, tokens) for n in length.tolist()], device, first.tolist())
    start = None if call.initial is None else call.initial.clone()
    inner = call.out.shape[1], *((call.tokens.value_dim, call.tokens.key_dim)[:: 1 if call.state_v_first else -1])
    middle = torch.zeros((len(length), *inner), device=device)
    plain = {"checkpoints": None, "checkpoint_pool": None}
    original(replace(call, segments=head, final=middle, write_slots=None, **plain))
    original(replace(call, initial=start))
    rest = [max(n - tokens, 0) for n in length.tolist()]
    tail = Segments.from_lengths(rest, device, [f + min(n, tokens) for f, n in zip(first, length)])
    original(replace(call, segments=tail, initial=change(middle), final=None, read_slots=None, write_slots=None,
                     has_initial_state=None, **plain))  # fmt: skip


@wraps("prefill", caught_by=("B26", "shapes"))
def state_dropped_after_the_first_chunk(original: Any, call: PrefillCall) -> None:
    _second_part(call, torch.zeros_like, original)


@wraps("prefill", caught_by=("long",))
def long_sequences_cut_as_if_forgotten(original: Any, call: PrefillCall) -> None:
    _second_part(call, torch.zeros_like, original, tokens=512)


@wraps("prefill", caught_by=("B26",))
def carried_state_read_transposed(original: Any, call: PrefillCall) -> None:
    if call.tokens.key_dim != call.tokens.value_dim:
        return original(call)
    return _second_part(call, lambda state: state.transpose(-1, -2).contiguous(), original)


@wraps("prefill", "decode", caught_by=("B27",))
def initial_state_read_transposed(original: Any, call: Any) -> None:
    original(replace(call, state_v_first=not call.state_v_first))


@wraps("prefill", caught_by=("B46",))
def slots_taken_for_the_identity(original: Any, call: PrefillCall) -> None:
    if call.read_slots is None or call.initial is None:
        return original(call)
    return original(
        replace(call, read_slots=torch.arange(call.segments.count), write_slots=torch.arange(call.segments.count))
    )


@wraps("prefill", "decode", caught_by=("slots", "decode-tokens_anywhere"))
def read_slots_ignored(original: Any, call: Any) -> None:
    original(replace(call, read_slots=call.write_slots))


@wraps("prefill", "decode", "verify", caught_by=("B46",))
def dense_copy_of_the_pool_updated(original: Any, call: Any) -> None:
    if isinstance(call, PrefillCall):
        final = None if call.final is None else call.final.contiguous()
        original(replace(call, final=final))
    else:
        original(replace(call, pool=call.pool.contiguous()))


@wraps("prefill", "decode", caught_by=("B42",))
def slot_stride_ignored(original: Any, call: Any) -> None:
    def dense(slots: Tensor | None) -> Tensor | None:
        if slots is None or not slots.numel():
            return slots
        # a wrapper that trusts is_contiguous() on a one-row view is right by luck; with more rows it is not
        return slots.as_strided(slots.shape, (1,))

    original(replace(call, read_slots=dense(call.read_slots), write_slots=dense(call.write_slots)))


@wraps("prefill", "decode", "verify", caught_by=("B39",))
def slot_offsets_in_32_bits(original: Any, call: Any) -> None:
    pool = call.initial if isinstance(call, PrefillCall) else call.pool
    if pool is None or pool.stride(0) * (pool.shape[0] - 1) < 2**31:
        return original(call)
    slots = torch.zeros_like(call.write_slots if isinstance(call, (PrefillCall, DecodeCall)) else call.slots)
    if isinstance(call, VerifyCall):
        return original(replace(call, slots=slots))
    return original(replace(call, read_slots=slots))


@wraps("prefill", caught_by=("B38",))
def token_offsets_in_32_bits(original: Any, call: PrefillCall) -> None:
    tokens = call.tokens
    limit = 2**31 // max(tokens.q.stride(0), 1)
    if limit >= tokens.count:
        return original(call)
    wrapped = torch.arange(tokens.count)
    wrapped[limit:] -= limit
    return original(with_tokens(call, q=tokens.q[wrapped], k=tokens.k[wrapped]))


@wraps("prefill", caught_by=("B68",))
def initial_state_multiplied_by_its_flag(original: Any, call: PrefillCall) -> None:
    if call.has_initial_state is None or call.initial is None or call.read_slots is None:
        return original(call)
    start = call.initial.clone()
    rows = call.read_slots.long().clamp(0)
    start[rows] = start[rows] * call.has_initial_state.to(start.dtype)[:, None, None, None]
    return original(replace(call, initial=start, has_initial_state=None))


@wraps("prefill", caught_by=("B68", "B21"))
def has_initial_state_ignored(original: Any, call: PrefillCall) -> None:
    original(replace(call, has_initial_state=None))


@wraps("prefill", caught_by=("B21",))
def empty_fresh_segment_keeps_the_old_tenant(original: Any, call: PrefillCall) -> None:
    if call.final is None or call.write_slots is None:
        return original(call)
    empty = [n for n, length in enumerate(lengths(call)) if not length]
    rows = [int(r) for r in call.write_slots[empty].tolist() if 0 <= r < call.final.shape[0]]
    before = call.final[rows].clone()
    original(call)
    call.final[rows] = before
    return None


@wraps("prefill", caught_by=("B14",))
def nan_reaches_the_whole_batch(original: Any, call: PrefillCall) -> None:
    original(call)
    rows = [range(int(f), int(f + n)) for f, n in zip(*call.segments.host_values())]
    covered = [row for span in rows for row in span]
    if covered:
        call.out[covered] += 0.0 * call.out[covered].sum()
