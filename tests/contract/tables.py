"""Segment tables that only the device knows, with rows that the call does not have."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import torch

from rapidkda import Segments

from .cases import case
from .graphs import Step
from .guards import all_zero
from .target import Target

TABLES = {"behind": (2, 40), "across": (-1, 2), "before": (-40, 40), "negative": (0, -3)}  # first token, more tokens


@case(
    "tables",
    operator=("decode", "verify_slots", "verify_replay", "verify_deferred", "conv", "prefill"),
    table=tuple(TABLES),
)
def rows_beyond_the_call_are_not_written(target: Target, operator: str, table: str) -> None:
    """A table may hold anything: what lies around the outputs and in other slots stays as it is. (The host refuses such
    tables where it sees them.)"""
    step = Step(target, operator)
    step.start_over()
    step.pool.before = step.pool.storage.clone()
    step.slots.copy_(torch.arange(step.slots.numel()).view_as(step.slots))
    step.accepted.fill_(1)
    tokens = step.out.shape[0]
    rows = torch.zeros((tokens + 160, *step.out.shape[1:]), dtype=step.out.dtype, device=target.device)
    step.out = rows[80 : 80 + tokens]
    past, more = TABLES[table]
    first, length = step.segments.first_token.clone(), step.segments.length.clone()
    first[1::2] += past if past < 0 else tokens + past
    length[1::2] += more
    step.segments = Segments(first, length, step.segments.max_length)
    # The torch backend reads tables on the host, and may refuse what it cannot index.
    with suppress(ValueError, RuntimeError, IndexError) if target.name == "torch" else nullcontext():
        step.run()
    all_zero("rows before the outputs", rows[:80])
    all_zero("rows behind the outputs", rows[80 + tokens :])
    step.pool.unchanged(range(step.slots.numel()))
