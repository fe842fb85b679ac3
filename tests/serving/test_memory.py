"""Bytes: what is planned is what is allocated, for pools, workspaces and tables; slots on reuse."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rapidkda.dispatch import Choice
from rapidkda.serving import StatePool, StateShape, StepBatch, StepLimits, StepRequest, Workspace, plan_bytes

from .driver import Driver
from .oracle import make_layer, make_workspace, only_on_torch

pytestmark = only_on_torch


def storage_bytes(pool: StatePool) -> int:
    """Bytes of the distinct storages behind a pool."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in pool.layers
        for value in state.tensors().values()
    }
    return sum(storages.values())


@pytest.mark.parametrize(
    ("rollback", "max_drafts", "record_rows", "state_dtype", "conv_dtype", "value_heads"),
    list(
        itertools.product(
            ["replay", "slots"],
            [0, 3],
            [None, 4, 5],
            [torch.float32, torch.bfloat16],
            [torch.bfloat16, torch.float32],
            [2, 4],
        )
    ),
)
def test_pool_bytes_are_exact(
    rollback: Any,
    max_drafts: int,
    record_rows: int | None,
    state_dtype: torch.dtype,
    conv_dtype: torch.dtype,
    value_heads: int,
) -> None:
    shape = StateShape(
        heads=2,
        key_dim=24,
        value_dim=16,
        value_heads=value_heads,
        max_drafts=max_drafts,
        rollback=rollback,
        record_rows=record_rows,
        state_dtype=state_dtype,
        conv_dtype=conv_dtype,
    )
    pool = StatePool(shape, 7, layers=3)
    assert plan_bytes(shape, 7, 3) == pool.nbytes == storage_bytes(pool)


def test_replay_needs_less_than_a_slot_a_token() -> None:
    """At the released models' dims: one 64 KiB state and 2 (k + 1) records of 1.5 KiB a head, not k + 1 states."""
    replay, slots = (StateShape(heads=16, max_drafts=3, rollback=form) for form in ("replay", "slots"))  # type: ignore[arg-type]
    per_request = [plan_bytes(shape, shape.slots_per_request) for shape in (replay, slots)]
    assert per_request[0] * 3 < per_request[1]


@pytest.mark.parametrize(
    ("fields", "rows", "defers"),
    [
        ({"max_drafts": 1}, 8, True),
        ({"max_drafts": 3}, 8, True),
        ({"max_drafts": 7}, 16, True),
        ({"max_drafts": 7, "record_rows": 9}, 9, True),
        ({"max_drafts": 7, "record_rows": 8}, 8, False),
        ({"max_drafts": 0}, 0, False),
        ({"max_drafts": 0, "record_rows": 2}, 2, True),
        ({"max_drafts": 0, "record_rows": 9}, 9, True),
        ({"max_drafts": 0, "record_rows": 9, "rollback": "slots"}, 0, False),
        ({"max_drafts": 7, "record_rows": 9, "rollback": "slots"}, 0, False),
    ],
)
def test_records_of_a_slot(fields: dict[str, Any], rows: int, defers: bool) -> None:
    shape = StateShape(heads=2, key_dim=8, value_dim=8, **fields)
    assert (shape.records_per_slot, shape.defers) == (rows, defers)
    state = StatePool(shape, 3).layers[0]
    assert (state.held is not None) == defers
    assert (state.records is not None) == (rows > 0)


@pytest.mark.parametrize("fixed", [False, True])
def test_table_bytes_are_exact(fixed: bool) -> None:
    pool = StatePool(StateShape(heads=1, key_dim=4, value_dim=4, max_drafts=3, rollback="slots"), 9)
    batch = StepBatch(pool, StepLimits(40, 5, max_prefills=2, max_checkpoints=3), fixed=fixed)
    assert batch.nbytes == batch._device.untyped_storage().nbytes() + batch._padding.untyped_storage().nbytes()
    rows, checkpoints, verifies = 7 * (2 + 5) + (2 + 1) + (5 + 1), 0 if fixed else 2 * 3, 5 * (3 + 4)
    assert batch.nbytes == 4 * (rows + checkpoints + verifies) + 40


class Scratch:
    """A backend that needs scratch, for planning only."""

    @staticmethod
    def workspace_bytes(op: str, sizes: Any) -> int:
        return int(sizes.tokens * 100 + sizes.segments * 7 + 1)


@pytest.fixture
def scratch_choice(monkeypatch: pytest.MonkeyPatch) -> Choice:
    monkeypatch.setattr(Choice, "backend", property(lambda self: Scratch()))
    return Choice("scratch", "test", "test", {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("limits", [StepLimits(1, 1), StepLimits(33, 5), StepLimits(4096, 64)])
@pytest.mark.parametrize("lanes", [1, 3])
def test_workspace_bytes_are_exact(dtype: torch.dtype, limits: StepLimits, lanes: int, scratch_choice: Choice) -> None:
    shape = StateShape(heads=3, key_dim=16, value_dim=24)
    workspace = Workspace(shape, limits, scratch_choice, dtype=dtype, lanes=lanes)
    assert workspace.nbytes == Workspace.plan_bytes(shape, limits, scratch_choice, dtype=dtype, lanes=lanes)
    assert workspace.nbytes == sum(buffer.untyped_storage().nbytes() for buffer in workspace._buffers)
    spans = []
    for lane in range(lanes):
        parts = (
            workspace.conv_output(limits.max_tokens, lane),
            workspace.core_output(limits.max_tokens, lane),
            workspace.scratch(lane),
        )
        assert [tuple(part.shape) for part in parts[:2]] == [(limits.max_tokens, 168), (limits.max_tokens, 3, 24)]
        assert len(parts[2]) >= limits.max_tokens * 100 + limits.max_prefills * 7 + 1
        assert all(part.data_ptr() % 256 == 0 for part in parts)
        spans += [(part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts]
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))  # nothing overlaps


def test_a_locked_workspace_never_grows() -> None:
    layer = make_layer()
    pool = StatePool(layer.state_shape(), 4)
    workspace = make_workspace(layer, pool, StepLimits(16, 2))
    workspace.reserve(StepLimits(64, 8))
    assert (workspace.max_tokens, workspace.max_prefills) == (64, 8)
    workspace.lock()
    size = workspace.nbytes
    workspace.reserve(StepLimits(64, 8))
    with pytest.raises(ValueError, match="locked workspace of 64 tokens and 8 prefills, got 65 and 8"):
        workspace.reserve(StepLimits(65, 8))
    assert workspace.nbytes == size


def test_lanes_do_not_disturb_each_other() -> None:
    driver = Driver()
    workspace = make_workspace(driver.layer, driver.pool, StepLimits(64, 4), lanes=2)
    slots = driver.pool.allocate("a")
    hidden = driver.hidden(20)
    driver.batch.fill([StepRequest("a", "prefill", 20, slots, has_initial_state=False)])
    before = workspace.core_output(64, 0).clone().view(torch.int32)
    driver.layer(hidden, driver.batch, driver.pool, workspace, lane=1)
    assert torch.equal(workspace.core_output(64, 0).view(torch.int32), before)


@pytest.mark.parametrize(("on_reuse", "expected"), [("zero", 0.0), ("poison", float("nan"))])
def test_slots_are_marked_on_reuse(on_reuse: Any, expected: float) -> None:
    pool = StatePool(StateShape(heads=1, key_dim=4, value_dim=4, max_drafts=1), 3, layers=2, on_reuse=on_reuse)
    pool.fill(range(3), 7.0)
    slot = pool.allocate("a")[0]
    for state in pool.layers:
        for value in state.tensors().values():
            mark = expected if value.is_floating_point() or expected == 0.0 else float(2**31 - 1)
            assert torch.equal(value[slot].float(), torch.full_like(value[slot].float(), mark)) or (
                mark != mark and value[slot].isnan().all()
            )
            others = [other for other in range(3) if other != slot]
            assert (value[others] == 7.0).all()


def test_debug_mode_poisons_freed_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPIDKDA_CHECK", "1")
    pool = StatePool(StateShape(heads=1, key_dim=4, value_dim=4), 2)
    slot = pool.allocate("a")[0]
    pool.fill([slot], 1.0)
    pool.free("a")
    assert pool.layers[0].recurrent[slot].isnan().all()


def test_debug_mode_names_the_request_of_the_first_non_finite_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPIDKDA_CHECK", "1")
    driver = Driver()
    records, inputs = [], {}
    for name in ("good", "bad"):
        records.append(StepRequest(name, "prefill", 8, driver.pool.allocate(name), has_initial_state=False))
        inputs[name] = driver.hidden(8)
    inputs["bad"][5, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"'bad'.*slot \d+ of KDA layer 0"):
        driver.step(*records, inputs=inputs)


@pytest.mark.parametrize(
    "form",
    [
        {"record_rows": 4},
        {},
        {"record_rows": 40},
        {"max_drafts": 0, "record_rows": 2},
        {"max_drafts": 0, "record_rows": 9},
    ],
)
def test_debug_mode_finds_what_a_deferred_state_is_yet_to_take_in(
    monkeypatch: pytest.MonkeyPatch, form: dict[str, int]
) -> None:
    monkeypatch.setenv("RAPIDKDA_CHECK", "1")
    driver = Driver(**form)  # type: ignore[arg-type]
    count = min(2, driver.pool.shape.verify_tokens)
    for name in ("good", "bad"):
        driver.prefill(name, driver.hidden(8))

    def verify(accepted: int, spoilt: bool = False) -> None:
        inputs = {name: driver.hidden(count) for name in ("good", "bad")}
        if spoilt:
            inputs["bad"][0, 0] = float("nan")
        steps = [StepRequest(name, "verify", count, driver.slots(name), accepted=accepted) for name in inputs]
        driver.step(*steps, inputs=inputs)

    verify(0)
    verify(count, spoilt=True)  # the state before these tokens is finite
    with pytest.raises(FloatingPointError, match=r"'bad'.*slot \d+ of KDA layer 0"):
        verify(1)
