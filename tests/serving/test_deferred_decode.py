"""Decodes as verifications of one token: without drafts too, states are stored only where their records are full.

Gates are weak, so that a record that is dropped, applied twice or read from another place shows many tokens later.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rapidkda.serving import StatePool, StepRequest, export_state, import_state
from rapidkda.testing.tolerances import relative_error

from .driver import Driver
from .oracle import TARGET, State, changed_slots, make_layer, only_on_torch, resting_state

OUT = TARGET.out
STATE = TARGET.state
ROWS = [2, 3, 8]


def deferring(rows: int, seed: int = 0) -> Driver:
    return Driver(make_layer(seed), max_drafts=0, record_rows=rows)


def one_token(driver: Driver, name: Hashable, state: State, kind: str = "verify") -> State:
    """Run one more token of a request and judge its output; returns the oracle's state after it."""
    assert driver.pool.slots is not None
    accepted = driver.pool.slots.open_drafts(name)
    hidden = driver.hidden(1)
    record = StepRequest(name, kind, 1, driver.slots(name), accepted=accepted)  # type: ignore[arg-type]
    got = driver.step(record, inputs={name: hidden})[name]
    wanted, states = driver.oracle.run(hidden, state)
    assert relative_error(got, wanted) <= OUT
    return states[-1]


def assert_rests_at(driver: Driver, name: Hashable, wanted: State) -> None:
    got = resting_state(driver.pool, driver.slots(name)[0])
    assert relative_error(got.recurrent, wanted.recurrent) <= STATE
    assert relative_error(got.history, wanted.history) <= STATE


@pytest.mark.parametrize("rows", ROWS)
def test_a_state_is_stored_once_in_as_many_tokens_as_it_has_records(rows: int) -> None:
    driver = deferring(rows)
    state = driver.prefill("a", driver.hidden(11))
    slot, kept = driver.slots("a")[0], driver.pool.layers[0].recurrent
    before, stored = kept[slot].clone(), []
    for token in range(4 * rows):
        state = one_token(driver, "a", state)
        if not torch.equal(kept[slot], before):
            stored.append(token)
            before = kept[slot].clone()
    assert stored == [rows, 2 * rows, 3 * rows]
    driver.settle("a", 1)
    assert_rests_at(driver, "a", state)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("other", ["decode", "prefill"])
def test_leaving_and_coming_back_at_any_number_of_records(rows: int, other: str) -> None:
    driver = deferring(rows)
    state = driver.prefill("a", driver.hidden(5))
    for count in range(1, rows + 3):
        for _ in range(count):
            state = one_token(driver, "a", state)
        state = one_token(driver, "a", state, other)
        assert_rests_at(driver, "a", state)


@pytest.mark.parametrize("rows", ROWS)
def test_requests_of_one_step_hold_different_numbers_of_records(rows: int) -> None:
    """Four requests start one after another, beside a prompt in chunks and padding."""
    driver = deferring(rows)
    names = ["a", "b", "c", "d"]
    states: dict[Hashable, State] = {"prompt": driver.prefill("prompt", driver.hidden(3))}
    assert driver.pool.slots is not None
    for step in range(2 * rows + 4):
        if step < len(names):
            states[names[step]] = driver.prefill(names[step], driver.hidden(4))
        records = [
            StepRequest(name, "verify", 1, driver.slots(name), accepted=driver.pool.slots.open_drafts(name))
            for name in states
            if name != "prompt"
        ]
        records.insert(step % 3, StepRequest.padding(1))
        records.insert(step % 2, StepRequest("prompt", "prefill", 2, driver.slots("prompt")))
        inputs: dict[Hashable, Tensor] = {name: driver.hidden(1 + (name == "prompt")) for name in states}
        before = driver.snapshot()
        got = driver.step(*records, inputs=inputs)
        assert changed_slots(driver.pool, before) <= {driver.slots(name)[0] for name in states}
        for name, state in states.items():
            wanted, after = driver.oracle.run(inputs[name], state)
            assert relative_error(got[name], wanted) <= OUT
            states[name] = after[-1]


@only_on_torch
def test_a_new_tenant_starts_without_the_records_of_the_last_one() -> None:
    driver = deferring(4)
    state = driver.prefill("old", driver.hidden(5))
    for _ in range(3):
        state = one_token(driver, "old", state)
    slots = driver.slots("old")
    driver.pool.free("old")
    state = driver.prefill("new", driver.hidden(6))
    assert driver.slots("new") == slots
    for _ in range(6):
        state = one_token(driver, "new", state)
    hidden = driver.hidden(2)  # and afresh under its own name, with a token open
    driver.step(StepRequest("new", "prefill", 2, slots, has_initial_state=False), inputs={"new": hidden})
    state = driver.oracle.run(hidden, driver.oracle.fresh())[1][-1]
    for _ in range(6):
        state = one_token(driver, "new", state)


def test_a_prompt_checkpoint_is_resumed_by_requests_that_decode_so() -> None:
    """The checkpoint is taken by a request that has a token open, and stays as it is."""
    driver = deferring(3)
    state = driver.prefill("a", driver.hidden(7))
    for _ in range(5):
        state = one_token(driver, "a", state)
    (target,) = driver.pool.allocate("prefix", 1)
    chunk = driver.hidden(20)
    record = StepRequest("a", "prefill", 20, driver.slots("a"), accepted=1, checkpoints=((16, target),))
    driver.step(record, inputs={"a": chunk})
    states = driver.oracle.run(chunk, state)[1]
    kept = resting_state(driver.pool, target)
    for name, kind in (("b", "decode"), ("c", "prefill")):
        hidden = driver.hidden(1)
        record = StepRequest(name, kind, 1, driver.pool.allocate(name), read_slot=target)  # type: ignore[arg-type]
        got = driver.step(record, inputs={name: hidden})[name]
        wanted, after = driver.oracle.run(hidden, states[15])
        assert relative_error(got, wanted) <= OUT
        own = after[-1]
        for _ in range(5):
            own = one_token(driver, name, own)
    for _ in range(4):
        states[-1] = one_token(driver, "a", states[-1])
    assert torch.equal(resting_state(driver.pool, target).recurrent, kept.recurrent)
    assert relative_error(kept.recurrent, states[15].recurrent) <= STATE


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
def test_hand_over_with_a_token_open(steps: int) -> None:
    """Between pools of any number of records, twice alike; the exported state is the one before the open token."""
    drivers = [deferring(rows, seed=1) for rows in ROWS]
    for source in drivers:
        state = before = source.prefill("a", source.hidden(9))
        for _ in range(steps):
            before, state = state, one_token(source, "a", state)
        whole = source.snapshot()
        blob = export_state(source.pool, source.slots("a"), 1)
        assert not changed_slots(source.pool, whole)
        exported = blob.layers[0]["recurrent"][:, 0].transpose(-1, -2)
        assert relative_error(exported, before.recurrent.cpu()) <= STATE
        for target in drivers:
            name = f"from {source.pool.shape.record_rows}"
            slots = target.pool.allocate(name)
            target.pool.fill(slots, float("nan"))
            for _ in range(2):
                import_state(target.pool, slots, blob, name)
            moved = state
            for kind in ("verify", "verify", "verify", "decode"):
                moved = one_token(target, name, moved, kind)
            assert_rests_at(target, name, moved)


@only_on_torch
def test_an_open_token_goes_only_to_pools_that_know_of_it() -> None:
    driver = deferring(4)
    state = driver.prefill("a", driver.hidden(9))
    state = one_token(driver, "a", state)
    blob = export_state(driver.pool, driver.slots("a"), 1)
    plain = replace(driver.pool.shape, record_rows=None)
    with pytest.raises(ValueError, match="open_drafts must be 0 to 0 for this pool, got 1"):
        import_state(StatePool(plain, 4), (1,), blob)
    with pytest.raises(ValueError, match="max_drafts 3, got 0"):
        import_state(StatePool(replace(plain, max_drafts=3), 4), (1,), blob)
    driver.settle("a", 1)
    pool = StatePool(plain, 4)
    import_state(pool, (1,), export_state(driver.pool, driver.slots("a")))  # settled, it goes anywhere
    assert relative_error(resting_state(pool, 1).recurrent, state.recurrent) <= STATE


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_records_past_those_that_count_are_never_read(poison: float) -> None:
    driver = deferring(5)
    state = driver.prefill("a", driver.hidden(6))
    kept, slot = driver.pool.layers[0].records, driver.slots("a")[0]
    assert kept is not None
    for token in range(12):
        state = one_token(driver, "a", state)
        kept[slot, token % 5 + 1 :] = poison


@only_on_torch  # elsewhere bfloat16 rounds near-ties apart
def test_greedy_tokens_are_those_of_plain_decode() -> None:
    streams = []
    generator = torch.Generator().manual_seed(3)
    embedding, head = torch.randn(29, 32, generator=generator), torch.randn(32, 29, generator=generator)
    for rows in (None, 2, 7):
        driver = Driver(make_layer(11), max_drafts=0, record_rows=rows)
        slots = driver.pool.allocate("a")
        record, fed = StepRequest("a", "prefill", 5, slots, has_initial_state=False), [1, 5, 2, 8, 3]
        stream: list[int] = []
        while len(stream) < 150:
            hidden = embedding[fed]
            out = driver.step(record, inputs={"a": hidden})["a"]
            stream.append(int(((hidden + 4.0 * out) @ head)[-1].argmax()))
            fed, told = [stream[-1]], int(record.kind == "verify")
            record = StepRequest("a", "decode" if rows is None else "verify", 1, slots, accepted=told)
        streams.append(stream)
    assert len(set(streams[0])) > 5
    assert streams[1] == streams[0]
    assert streams[2] == streams[0]
