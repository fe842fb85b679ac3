"""The random schedules have teeth: each fault put into the serving layer is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from rapidkda import ops
from rapidkda.serving import StatePool, StepBatch, core, plan, transfer
from rapidkda.serving.slots import SlotTable
from rapidkda.serving.tables import RowStore, VerifyStore

from .test_schedules import DeferringEngine, Engine, ReplayEngine, SlotsEngine

Patch = pytest.MonkeyPatch


def row_with(patch: Patch, change: Callable[[plan.Row], plan.Row]) -> None:
    """Alter every planned row."""
    build = plan._row
    patch.setattr(plan, "_row", lambda *arguments: change(build(*arguments)))


def call_with(patch: Patch, name: str, **changes: Any) -> None:
    """Alter keywords of an operator's calls; callables map the old value."""
    operator = getattr(ops, name)

    def changed(*arguments: Any, **keywords: Any) -> Any:
        for key, value in changes.items():
            if key in keywords:
                keywords[key] = value(keywords[key]) if callable(value) else value
        return operator(*arguments, **keywords)

    patch.setattr(core.ops, name, changed)


def counts_by_row(patch: Patch) -> None:
    """Accepted counts in an earlier row order."""
    write = VerifyStore.write

    def shifted(self: VerifyStore, rows: Any, pad_slot: int) -> None:
        counts = [row.accepted for row in rows]
        write(self, [replace(row, accepted=count) for row, count in zip(rows, counts[1:] + counts[:1])], pad_slot)

    patch.setattr(VerifyStore, "write", shifted)


def state_without_history(patch: Patch) -> None:
    write = transfer._write

    def partial(state: Any, shape: Any, slots: Any, parts: dict[str, Any]) -> None:
        write(state, shape, slots, {**parts, "conv_v": parts["conv_v"] * 0})

    patch.setattr(transfer, "_write", partial)


def deferred_records_left_behind(patch: Patch) -> None:
    """An exported state without the records before those of the open drafts."""
    patch.setattr(transfer, "_before_the_open", lambda state, records, held, count: (state, records[:count]))


def imported_beside_old_records(patch: Patch) -> None:
    """The number of records of the slot's last tenant."""
    write = transfer._write

    def partial(state: Any, shape: Any, slots: Any, parts: dict[str, Any]) -> None:
        before = None if state.held is None else state.held.clone()
        write(state, shape, slots, parts)
        if before is not None:
            state.held.copy_(before)

    patch.setattr(transfer, "_write", partial)


def last_state_as_checkpoint(patch: Patch) -> None:
    """The prefill's final state exported for every checkpoint (of the recurrent state only)."""
    prefill = ops.prefill_layer

    def wrong(*arguments: Any, **keywords: Any) -> Any:
        out = prefill(*arguments, **keywords)
        if keywords["checkpoints"] is not None:
            begin, _, slot = keywords["checkpoints"].host
            for row, target in enumerate(keywords["slots"].tolist()):
                for exported in slot[begin[row] : begin[row + 1]]:
                    keywords["state"][exported] = keywords["state"][target]
        return out

    patch.setattr(core.ops, "prefill_layer", wrong)


def padding_left_alone(patch: Patch) -> None:
    patch.setattr(StepBatch, "zero_padding", lambda self, rows: None)


def slots_given_twice(patch: Patch) -> None:
    """A freed slot is offered twice."""
    free = SlotTable.free

    def doubled(self: SlotTable, owner: Any) -> tuple[int, ...]:
        slots = free(self, owner)
        self._free.extend(slots)
        return slots

    patch.setattr(SlotTable, "free", doubled)


def padding_marker_given_out(patch: Patch) -> None:
    """A pool whose slot 0 is the padding marker offers it like any other."""
    start = SlotTable.__init__

    def generous(self: SlotTable, num_slots: int, pad_slot: int = -1) -> None:
        start(self, num_slots, pad_slot)
        if pad_slot == 0:
            self._free.append(0)

    patch.setattr(SlotTable, "__init__", generous)


def begin_on_one_grid(patch: Patch) -> None:
    """Checkpoints of later requests indexed as if they were the first one's."""
    write = RowStore.write

    def wrong(self: RowStore, rows: Any, pad_slot: int) -> None:
        write(self, rows, pad_slot)
        begin, _, slot = self._checkpoints
        exported = int(begin[len(rows)])
        slot[:exported] = slot[:exported][::-1].copy()

    patch.setattr(RowStore, "write", wrong)


def scratch_read_past_the_end(patch: Patch) -> None:
    """An output row that no kernel wrote."""
    call_with(patch, "decode", out=lambda out: out.clone())


FAULTS: dict[str, tuple[type[Engine], Callable[[Patch], None]]] = {
    "no rollback of the state": (SlotsEngine, lambda p: row_with(p, lambda r: replace(r, read_slot=r.slots[0]))),
    "records never folded in": (ReplayEngine, lambda p: call_with(p, "commit", accepted=lambda a: a * 0)),
    "one record too many": (ReplayEngine, lambda p: call_with(p, "verify", accepted=lambda a: a + (a > 0).int())),
    "one record too few": (ReplayEngine, lambda p: call_with(p, "commit", accepted=lambda a: (a - 1).clamp(min=0))),
    "deferred records dropped": (
        ReplayEngine,
        lambda p: call_with(p, "verify", held=lambda h: h if h is None else h * 0),
    ),
    "deferred records not committed": (ReplayEngine, lambda p: call_with(p, "commit", held=None)),
    "decode that forgets what is deferred": (
        DeferringEngine,
        lambda p: call_with(p, "verify", accepted=lambda a: a * 0),
    ),
    "deferred decodes not committed": (DeferringEngine, lambda p: call_with(p, "commit", accepted=lambda a: a * 0)),
    "deferred records left behind": (DeferringEngine, deferred_records_left_behind),
    "hand-over beside old records": (ReplayEngine, imported_beside_old_records),
    "no rollback of the history": (ReplayEngine, lambda p: call_with(p, "causal_conv", accepted=lambda a: None)),
    "history kept as by a decode": (ReplayEngine, lambda p: call_with(p, "causal_conv", keep_all=False)),
    "history of the own slot": (
        ReplayEngine,
        lambda p: row_with(p, lambda r: replace(r, conv_read_slot=r.slots[0])),
    ),
    "state of the own slot": (ReplayEngine, lambda p: row_with(p, lambda r: replace(r, read_slot=r.slots[0]))),
    "stale state for a fresh request": (
        ReplayEngine,
        lambda p: row_with(p, lambda r: replace(r, has_initial_state=True)),
    ),
    "continued prefill from zero": (
        ReplayEngine,
        lambda p: call_with(p, "prefill_layer", has_initial_state=lambda h: h * 0),
    ),
    "counts in another row order": (SlotsEngine, counts_by_row),
    "counts in another row order, replay": (ReplayEngine, counts_by_row),
    "hand-over without the history of v": (ReplayEngine, state_without_history),
    "last state as checkpoint": (ReplayEngine, last_state_as_checkpoint),
    "checkpoints swapped": (SlotsEngine, begin_on_one_grid),
    "padding not cleared": (SlotsEngine, padding_left_alone),
    "slot given out twice": (ReplayEngine, slots_given_twice),
    "decode outputs lost": (ReplayEngine, scratch_read_past_the_end),
    "slots never taken back": (ReplayEngine, lambda p: p.setattr(StatePool, "free", lambda self, owner: None)),
    "padding marker given out": (ReplayEngine, padding_marker_given_out),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, inject = FAULTS[fault]
    inject(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError)):  # KeyError: from the tables that a fault broke
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=3000,  # the search also depends on what other modules are loaded: long enough for all
                stateful_step_count=60,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
