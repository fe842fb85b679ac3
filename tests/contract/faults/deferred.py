"""Faults of deferred states: what is folded, where records go, what is stored when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rapidkda.backends.torch import TorchBackend
from rapidkda.problem import CommitCall, VerifyCall

from .install import lengths, wraps

SCHEDULE = ("deferred-every_step_of_a_schedule", "deferred-steps_of_a_short_schedule")
RANGE = "deferred-held_is_brought_into_range"


def active(call: VerifyCall) -> list[tuple[int, int]]:
    """Slot and number of tokens of the requests that are run."""
    rows = zip(call.slots.tolist(), lengths(call), strict=True)
    return [(slot, count) for slot, count in rows if count and slot != call.pad_slot]


def with_held(original: Any, call: VerifyCall | CommitCall, held: Tensor) -> None:
    """Run a call that believes in other numbers of records."""
    if call.held is None:
        return original(call)
    original(replace(call, held=held))
    if isinstance(call, VerifyCall):
        slots = [slot for slot, _ in active(call)]
        call.held[slots] = held[slots]
    return None


@wraps("verify", "commit", caught_by=SCHEDULE)
def held_ignored(original: Any, call: VerifyCall | CommitCall) -> None:
    if call.held is None:
        return original(call)
    return with_held(original, call, torch.zeros_like(call.held))


@wraps("verify", caught_by=SCHEDULE)
def held_of_a_request_that_starts_afresh_believed(original: Any, call: VerifyCall) -> None:
    if call.held is None:
        return original(call)
    held, accepted = call.held.clone(), call.accepted.clone()
    for n, slot in enumerate(call.slots.tolist()):
        if slot != call.pad_slot and accepted[n] == 0 and int(held[slot].min()) > 0:
            held[slot] -= 1
            accepted[n] = 1
    return with_held(original, replace(call, accepted=accepted), held)


@wraps("verify", "commit", caught_by=(RANGE,))
def held_wraps_around(original: Any, call: VerifyCall | CommitCall) -> None:
    if call.held is None or call.records is None:
        return original(call)
    return with_held(original, call, call.held % (call.records.shape[1] + 1))


@wraps("verify", "commit", caught_by=(RANGE,))
def one_number_for_all_heads(original: Any, call: VerifyCall | CommitCall) -> None:
    if call.held is None:
        return original(call)
    return with_held(original, call, call.held[:, :1].expand_as(call.held).clone())


@wraps("verify", caught_by=SCHEDULE)
def held_not_written(original: Any, call: VerifyCall) -> None:
    original(call if call.held is None else replace(call, held=call.held.clone()))


@wraps("verify", caught_by=SCHEDULE)
def held_written_for_padding(original: Any, call: VerifyCall) -> None:
    original(call)
    if call.held is not None:
        call.held[[slot for slot in range(call.held.shape[0]) if slot not in dict(active(call))]] = 0


@wraps("commit", caught_by=("deferred",))
def held_cleared_by_a_commit(original: Any, call: CommitCall) -> None:
    original(call)
    if call.held is not None:
        call.held[call.slots.long()] = 0


def _move_records(original: Any, call: VerifyCall, by: int) -> None:
    """New records lie `by` rows from where they belong (None: at the first row)."""
    if call.records is None or call.held is None:
        return original(call)
    before = call.records.clone()
    original(call)
    for slot, count in active(call):
        base = int(call.held[slot, 0])
        made = call.records[slot, base : base + count].clone()
        target = min(base + by, call.records.shape[1] - count) if by else 0
        call.records[slot] = before[slot]
        call.records[slot, target : target + count] = made
    return None


@wraps("verify", caught_by=SCHEDULE)
def records_put_at_the_first_row(original: Any, call: VerifyCall) -> None:
    _move_records(original, call, 0)


@wraps("verify", caught_by=SCHEDULE)
def records_put_one_row_too_far(original: Any, call: VerifyCall) -> None:
    _move_records(original, call, 1)


@wraps("verify", caught_by=SCHEDULE)
def held_counts_a_rejected_record(original: Any, call: VerifyCall) -> None:
    original(call)
    if call.held is not None:
        call.held[[slot for slot, _ in active(call)]] += 1


@wraps("verify", caught_by=SCHEDULE)
def state_stored_in_every_step(original: Any, call: VerifyCall) -> None:
    """And its records folded in once more by the next one."""
    if call.records is None or call.held is None:
        return original(call)
    whole = CommitCall(
        call.pool.clone(),
        call.records.clone(),
        call.held.clone(),
        call.slots,
        call.accepted,
        call.state_v_first,
        call.pad_slot,
    )
    original(call)
    TorchBackend().commit(whole)
    for slot, _ in active(call):
        call.pool[slot] = whole.pool[slot]
    return None


@wraps("verify", caught_by=SCHEDULE)
def state_not_stored_when_the_records_are_full(original: Any, call: VerifyCall) -> None:
    original(call if call.held is None else replace(call, pool=call.pool.clone()))


@wraps("verify", caught_by=SCHEDULE)
def records_full_one_row_early(original: Any, call: VerifyCall) -> None:
    """Right but slower, where a step is shorter than the records."""
    if call.records is None or call.held is None or max(lengths(call), default=0) >= call.records.shape[1]:
        return original(call)
    return original(replace(call, records=call.records[:, :-1]))


@wraps("verify", caught_by=("deferred",))
def records_past_the_accepted_ones_multiplied_by_zero(original: Any, call: VerifyCall) -> None:
    original(call)
    if call.records is None or call.held is None:
        return
    first, length = (x.tolist() for x in call.segments.host_values())
    for n, slot in enumerate(call.slots.tolist()):
        past = call.records[slot, max(int(call.accepted[n]), 0) :]
        call.out[first[n] : first[n] + length[n]] += (0.0 * past.sum()).to(call.out.dtype)
