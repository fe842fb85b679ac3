"""Steps that do not fit are refused by name before anything is written: not a bit of a pool or of the books changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rapidkda.serving import (
    LayerState,
    SlotsExhausted,
    SlotTable,
    StatePool,
    StateShape,
    StepBatch,
    StepLimits,
    StepRequest,
    Workspace,
)

from .driver import Driver
from .oracle import changed_slots, make_layer, make_workspace, only_on_torch

pytestmark = only_on_torch

SMALL = StepLimits(max_tokens=64, max_requests=4, max_decodes=2, max_checkpoints=1)


def two_requests(rollback: str = "replay", pad_slot: int = 0) -> Driver:
    """Request "a" with 4 open drafts, "b" settled, slot(s) of "cp" for a checkpoint, all in a pool with k_max 3."""
    driver = Driver(rollback=rollback, pad_slot=pad_slot, limits=SMALL)  # type: ignore[arg-type]
    driver.prefill("a", driver.hidden(5))
    driver.prefill("b", driver.hidden(5))
    driver.pool.allocate("cp", 1)
    driver.step(StepRequest("a", "verify", 4, driver.slots("a")), inputs={"a": driver.hidden(4)})
    return driver


Build = Callable[[Driver], list[StepRequest]]


def of(name: str, kind: str = "decode", count: int = 1, **fields: Any) -> Build:
    """One record of a request, with its true slots unless `fields` say otherwise."""

    def build(driver: Driver) -> list[StepRequest]:
        return [StepRequest(name, kind, count, **{"slots": driver.slots(name), **fields})]  # type: ignore[arg-type]

    return build


def both(first: Build, second: Build) -> Build:
    return lambda driver: first(driver) + second(driver)


def slot_of(driver: Driver, name: str) -> int:
    return driver.slots(name)[0]


REFUSED: dict[str, tuple[Build, type[Exception], str]] = {
    "unknown kind": (of("b", "extend"), ValueError, "kind"),
    "not a record": (lambda d: [("b", 1)], TypeError, "StepRequest"),  # type: ignore[list-item]
    "decode of two tokens": (of("b", count=2), ValueError, r"num_tokens of request 'b'.* 1, got 2"),
    "negative tokens": (of("b", "prefill", -1), ValueError, "num_tokens"),
    "fractional tokens": (of("b", "prefill", 1.5), TypeError, "num_tokens"),  # type: ignore[arg-type]
    "drafts beyond k_max": (of("b", "verify", 5), ValueError, r"num_tokens.*1 to 4.*got 5"),
    "verification of nothing": (of("b", "verify", 0), ValueError, "num_tokens"),
    "no slots": (of("b", slots=()), ValueError, "slots of request 'b'"),
    "too many slots": (of("b", slots=(1, 2, 3, 4, 5)), ValueError, "slots of request 'b'"),
    "slot past the pool": (of("b", slots=(40,)), ValueError, r"slots of request 'b'.*0\.\.39, got 40"),
    "negative slot": (of("b", slots=(-3,)), ValueError, r"slots of request 'b'"),
    "padding marker as a target": (of("b", slots=(0,)), ValueError, "padding marker"),
    "a free slot": (of("b", slots=(39,)), ValueError, "slot 39, which is free"),
    "another's slot": (lambda d: [StepRequest("b", "decode", 1, d.slots("a"))], ValueError, "belongs to 'a'"),
    "request twice": (both(of("b"), of("b", "prefill", 3)), ValueError, "request_id of request 'b'"),
    "two requests on one slot": (
        lambda d: [StepRequest("b", "decode", 1, d.slots("b")), StepRequest("c", "decode", 1, d.slots("b"))],
        ValueError,
        "slots of request 'c'.*shared.*belongs to 'b'",
    ),
    "fresh decode": (of("b", has_initial_state=False), ValueError, "has_initial_state"),
    "fresh verification": (of("b", "verify", 2, has_initial_state=False), ValueError, "has_initial_state"),
    "acceptance unsaid": (of("a"), ValueError, r"accepted of request 'a'.*1 to 4.*got 0"),
    "acceptance beyond the drafts": (of("a", accepted=5), ValueError, r"accepted of request 'a'.*1 to 4.*got 5"),
    "negative acceptance": (of("a", accepted=-1), ValueError, "accepted of request 'a'"),
    "acceptance of nothing": (of("b", accepted=1), ValueError, "accepted of request 'b'.*no verify"),
    "acceptance when starting afresh": (
        of("a", "prefill", 3, accepted=1, has_initial_state=False),
        ValueError,
        "accepted of request 'a'",
    ),
    "tokens going back": (
        both(of("b", "prefill", 8, first_token=4), of("a", accepted=1, first_token=11)),
        ValueError,
        r"first_token of request 'a'.*12, got 11",
    ),
    "negative first token": (of("b", first_token=-1), ValueError, "first_token"),
    "more tokens than planned": (of("b", "prefill", 65), ValueError, r"max_tokens = 64.*got 65"),
    "more decodes than planned": (
        lambda d: [StepRequest(n, "decode", 1, d.pool.allocate(n)) for n in "xyz"],
        ValueError,
        r"max_decodes = 2.*got 3",
    ),
    "more requests than planned": (
        lambda d: [StepRequest(n, "prefill", 1, d.pool.allocate(n)) for n in "vwxyz"],
        ValueError,
        r"max_requests = 4.*got 5",
    ),
    "more checkpoints than planned": (
        lambda d: [
            StepRequest("b", "prefill", 32, d.slots("b"), checkpoints=tuple(zip((16, 32), d.pool.allocate("x", 2))))
        ],
        ValueError,
        r"max_checkpoints = 1.*got 2",
    ),
    "unaligned checkpoint": (
        lambda d: of("b", "prefill", 32, checkpoints=((17, slot_of(d, "cp")),))(d),
        ValueError,
        "checkpoints of request 'b'.*offset 17",
    ),
    "checkpoint past the chunk": (
        lambda d: of("b", "prefill", 31, checkpoints=((32, slot_of(d, "cp")),))(d),
        ValueError,
        "offset 32",
    ),
    "checkpoint at the start": (
        lambda d: of("b", "prefill", 32, checkpoints=((0, slot_of(d, "cp")),))(d),
        ValueError,
        "checkpoints",
    ),
    "checkpoint into a request's slot": (
        lambda d: of("b", "prefill", 32, checkpoints=((16, slot_of(d, "b")),))(d),
        ValueError,
        "checkpoints of request 'b'.*written",
    ),
    "checkpoint into a free slot": (of("b", "prefill", 32, checkpoints=((16, 39),)), ValueError, "slot 39.*free"),
    "checkpoint into padding": (of("b", "prefill", 32, checkpoints=((16, 0),)), ValueError, "padding marker"),
    "checkpoint of a decode": (
        lambda d: of("b", checkpoints=((16, slot_of(d, "cp")),))(d),
        ValueError,
        "checkpoints of request 'b'",
    ),
    "reading a slot that is written": (
        lambda d: [
            *of("a", "prefill", 3, accepted=1)(d),
            StepRequest("b", "prefill", 3, d.slots("b"), read_slot=slot_of(d, "a")),
        ],
        ValueError,
        "read_slot of request 'b'.*written",
    ),
    "checkpoint into a request's slot that rests": (
        lambda d: of("b", "prefill", 32, checkpoints=((16, slot_of(d, "a")),))(d),
        ValueError,
        "checkpoints of request 'b'.*belongs to request 'a'",
    ),
    "reading a free slot": (of("b", "prefill", 2, read_slot=39), ValueError, "read_slot of request 'b'.*39.*free"),
    "reading a state whose drafts are open": (
        lambda d: of("b", "prefill", 2, read_slot=slot_of(d, "a"))(d),
        ValueError,
        "read_slot of request 'b'.*drafts are open",
    ),
    "reading a slot past the pool": (of("b", read_slot=77), ValueError, "read_slot of request 'b'"),
    "verification from another slot": (
        lambda d: of("b", "verify", 2, read_slot=slot_of(d, "cp"))(d),
        ValueError,
        "read_slot",
    ),
    "fresh from another slot": (
        lambda d: of("b", "prefill", 2, read_slot=slot_of(d, "cp"), has_initial_state=False)(d),
        ValueError,
        "read_slot",
    ),
    "padding with a slot": (
        lambda d: [replace(StepRequest.padding(2), slots=(5,))],
        ValueError,
        "slots, read_slot, checkpoints and accepted",
    ),
}


@pytest.mark.parametrize("rollback", ["replay", "slots"])
@pytest.mark.parametrize("case", sorted(REFUSED))
def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(case: str, rollback: str) -> None:
    build, error, message = REFUSED[case]
    driver = two_requests(rollback)
    records = build(driver)
    before = driver.snapshot()
    for given in (records, iter(records)):
        with pytest.raises(error, match=message):
            driver.batch.fill(given)  # type: ignore[arg-type]
    assert not changed_slots(driver.pool, before)
    assert driver.pool.slots is not None
    assert driver.pool.slots.open_drafts("a") == 4
    driver.batch.fill(of("a", accepted=4)(driver))  # the engine may correct itself


def test_num_tokens_must_reach_the_last_request() -> None:
    driver = two_requests()
    with pytest.raises(ValueError, match=r"num_tokens must reach.*8, got 7"):
        driver.batch.fill(of("b", "prefill", 8)(driver), num_tokens=7)


def test_a_pool_without_drafts_takes_no_verification() -> None:
    driver = Driver(max_drafts=0)
    driver.prefill("a", driver.hidden(3))
    with pytest.raises(ValueError, match="max_drafts = 0"):
        driver.batch.fill(of("a", "verify", 1)(driver))


def test_a_pool_of_deferred_decodes_verifies_one_token() -> None:
    driver = Driver(max_drafts=0, record_rows=2)
    driver.prefill("a", driver.hidden(3))
    with pytest.raises(ValueError, match=r"num_tokens of request 'a'.* 1 to 1 .*got 2"):
        driver.batch.fill(of("a", "verify", 2)(driver))
    driver.step(*of("a", "verify")(driver), inputs={"a": driver.hidden(1)})
    for kind in ("verify", "decode", "prefill"):
        for accepted in (0, 2):
            with pytest.raises(ValueError, match=rf"accepted of request 'a'.*1 to 1.*got {accepted}"):
                driver.batch.fill(of("a", kind, accepted=accepted)(driver))
    driver.batch.fill(of("a", accepted=1)(driver))


def forward_faults() -> dict[str, tuple[Callable[[Driver], dict[str, Any]], type[Exception], str]]:
    def other_pool(driver: Driver, **options: Any) -> StatePool:
        layer = make_layer(**options)
        return StatePool(layer.state_shape(3), 40, pad_slot=0)

    def other_batch(driver: Driver, **options: Any) -> dict[str, Any]:
        pool = other_pool(driver, **options)
        batch = StepBatch(pool, SMALL)
        slots = pool.allocate("x")
        batch.fill([StepRequest("x", "prefill", 8, slots, has_initial_state=False)])
        return {"pool": pool, "batch": batch}

    def workspace(driver: Driver, **options: Any) -> dict[str, Any]:
        arguments = {"shape": driver.pool.shape, "limits": SMALL, "dtype": torch.float32, **options}
        return {"workspace": Workspace(prefill=driver.layer.choices["prefill"], **arguments)}

    return {
        "rows": (lambda d: {"hidden": d.hidden(9)}, ValueError, r"hidden.*\[8, 32\], got \[9, 32\]"),
        "width": (lambda d: {"hidden": torch.zeros(8, 31)}, ValueError, "hidden"),
        "dtype": (lambda d: {"hidden": d.hidden(8).double()}, TypeError, "hidden.*float32, got float64"),
        "no tensor": (lambda d: {"hidden": [0.0]}, TypeError, "hidden"),
        "device": (lambda d: {"hidden": torch.zeros(8, 32, device="meta")}, ValueError, "hidden.*meta"),
        "batch of another pool": (lambda d: {"pool": other_pool(d)}, ValueError, "batch"),
        "heads of the pool": (lambda d: other_batch(d, heads=4), ValueError, "pool must have heads 2.*got 4"),
        "state dtype": (lambda d: other_batch(d, state_dtype=torch.bfloat16), TypeError, "state_dtype.*bfloat16"),
        "layers of the pool": (lambda d: setattr(d.layer, "pool_layer", 1) or {}, ValueError, "pool must have more"),
        "workspace tokens": (
            lambda d: workspace(d, limits=StepLimits(7, 4)),
            ValueError,
            "workspace of 7 tokens, got 8",
        ),
        "workspace prefills": (
            lambda d: workspace(d, limits=StepLimits(64, 4, max_prefills=0)),
            ValueError,
            "workspace of 0 prefills, got 1",
        ),
        "workspace dtype": (lambda d: workspace(d, dtype=torch.bfloat16), TypeError, "workspace.*float32"),
        "workspace shape": (
            lambda d: workspace(d, shape=replace(d.pool.shape, heads=4, value_heads=4)),
            ValueError,
            "workspace must be planned for",
        ),
        "lane": (lambda d: {"lane": 1}, ValueError, r"lane.*0\.\.0, got 1"),
    }


@pytest.mark.parametrize("case", sorted(forward_faults()))
def test_a_forward_that_does_not_fit_is_refused_and_changes_nothing(case: str) -> None:
    make, error, message = forward_faults()[case]
    driver = two_requests()
    driver.batch.fill(of("b", "prefill", 8)(driver))
    arguments: dict[str, Any] = {
        "hidden": driver.hidden(8),
        "batch": driver.batch,
        "pool": driver.pool,
        "workspace": driver.workspace,
        **make(driver),
    }
    before = driver.snapshot()
    with pytest.raises(error, match=message):
        driver.layer(**arguments)
    assert not changed_slots(driver.pool, before)


def test_checkpoints_are_refused_by_a_layer_built_without_them() -> None:
    driver = Driver(make_layer(checkpoints=False))
    slots, target = driver.pool.allocate("a"), driver.pool.allocate("cp", 1)
    record = StepRequest("a", "prefill", 16, slots, has_initial_state=False, checkpoints=((16, target[0]),))
    before = driver.snapshot()
    with pytest.raises(ValueError, match="checkpoints=False"):
        driver.step(record, inputs={"a": driver.hidden(16)})
    assert not changed_slots(driver.pool, before)


SHAPE = StateShape(heads=2, key_dim=8, value_dim=8, max_drafts=2)


@pytest.mark.parametrize(
    ("part", "value", "error"),
    [
        ("recurrent", torch.zeros(5, 2, 8, 7), ValueError),
        ("recurrent", torch.zeros(5, 2, 8, 8, dtype=torch.float64), TypeError),
        ("recurrent", torch.zeros(5, 8, 2, 8).transpose(1, 2), ValueError),
        ("conv", torch.zeros(4, 5, 48, dtype=torch.bfloat16), ValueError),
        ("conv", torch.zeros(5, 48, 5, dtype=torch.bfloat16), ValueError),
        ("conv", torch.zeros(5, 5, 48), TypeError),
        ("records", torch.zeros(5, 2, 2, 24), ValueError),
        ("records", torch.zeros(5, 3, 2, 24), ValueError),  # of states that are not deferred
        ("records", None, TypeError),
        ("held", torch.zeros(5, 1, dtype=torch.int32), ValueError),
        ("held", torch.zeros(5, 2, dtype=torch.int64), TypeError),
        ("held", torch.zeros(5, 4, dtype=torch.int32)[:, :2], ValueError),
        ("held", None, TypeError),
    ],
)
def test_a_wrapped_pool_must_fit_its_shape(part: str, value: torch.Tensor | None, error: type[Exception]) -> None:
    parts: dict[str, Any] = {
        "recurrent": torch.zeros(SHAPE.recurrent(5)),
        "conv": torch.zeros(SHAPE.conv(5), dtype=torch.bfloat16),
        "records": torch.zeros(SHAPE.records(5)),
        "held": torch.zeros(SHAPE.held(5), dtype=torch.int32),
    }
    assert StatePool.wrap(SHAPE, [LayerState(**parts)]).num_slots == 5
    with pytest.raises(error, match=part):
        StatePool.wrap(SHAPE, [LayerState(**{**parts, part: value})])


def test_a_wrapped_pool_has_no_number_of_records_that_nobody_keeps() -> None:
    shape = replace(SHAPE, record_rows=3)
    own = StatePool(shape, 5).layers[0]
    assert own.held is None
    with pytest.raises(ValueError, match="held"):
        StatePool.wrap(shape, [replace(own, held=torch.zeros(5, 2, dtype=torch.int32))])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"heads": 0}, "heads"),
        ({"heads": 2, "value_heads": 3}, "value_heads"),
        ({"heads": 2, "conv_width": 1}, "conv_width"),
        ({"heads": 2, "max_drafts": -1}, "max_drafts"),
        ({"heads": 2, "max_drafts": 3, "record_rows": 3}, "record_rows"),
        ({"heads": 2, "record_rows": 0}, "record_rows"),
        ({"heads": 2, "record_rows": 1}, "record_rows must be at least 2 with max_drafts = 0 .*got 1"),
        ({"heads": 2, "rollback": "undo"}, "rollback"),
        ({"heads": 2, "state_dtype": torch.float16}, "state_dtype"),
        ({"heads": 2, "conv_dtype": torch.int8}, "conv_dtype"),
    ],
)
def test_shapes_are_checked(fields: dict[str, Any], name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        StateShape(**fields)


def test_a_full_pool_says_so_and_keeps_its_books() -> None:
    table = SlotTable(4, pad_slot=0)
    assert table.available == 3
    first = table.allocate("a", 2)
    assert 0 not in first
    with pytest.raises(SlotsExhausted, match=r"'b' needs 2 slots, 1 of 4 are free"):
        table.allocate("b", 2)
    assert table.available == 1
    with pytest.raises(ValueError, match="'a'"):
        table.allocate("a")
    with pytest.raises(ValueError, match="'b'"):
        table.free("b")
    table.free("a")
    assert set(table.allocate("b", 3)) == {1, 2, 3}


def test_a_wrapped_pool_of_deferred_decodes_must_fit_its_shape() -> None:
    shape = replace(SHAPE, max_drafts=0, record_rows=4)
    own = StatePool(shape, 5).layers[0]
    pool = StatePool.wrap(shape, [own])
    limits = StepLimits(32, 4)
    batch = StepBatch(pool, limits)
    with pytest.raises(ValueError, match=r"accepted of request 'a'.*0 to 1"):
        batch.fill([StepRequest("a", "verify", 1, (4,), accepted=2)])
    batch.fill([StepRequest("a", "verify", 1, (4,), accepted=1)])
    for part in ("records", "held"):
        with pytest.raises(TypeError, match=part):
            StatePool.wrap(shape, [replace(own, **{part: None})])
    for part in ("records", "held"):
        state = LayerState(own.recurrent, own.conv, **{part: getattr(own, part)})
        with pytest.raises(ValueError, match=part):
            StatePool.wrap(replace(shape, record_rows=None), [state])
    plain = StepBatch(StatePool.wrap(replace(shape, record_rows=None), [LayerState(own.recurrent, own.conv)]), limits)
    with pytest.raises(ValueError, match=r"accepted of request 'a'.*0 with a pool that verifies nothing, got 1"):
        plain.fill([StepRequest("a", "decode", 1, (4,), accepted=1)])


def test_a_wrapped_pool_leaves_slots_to_its_engine() -> None:
    layer = make_layer()
    own = StatePool(layer.state_shape(2), 6)
    pool = StatePool.wrap(own.shape, own.layers)
    with pytest.raises(ValueError, match="slots"):
        pool.allocate("a")
    limits = StepLimits(32, 4)
    batch = StepBatch(pool, limits)
    batch.fill([StepRequest("a", "prefill", 3, (4,), has_initial_state=False)])
    layer(torch.ones(3, 32), batch, pool, make_workspace(layer, pool, limits))
    with pytest.raises(ValueError, match=r"accepted of request 'a'.*0 to 3"):
        batch.fill([StepRequest("a", "decode", 1, (4,), accepted=4)])
