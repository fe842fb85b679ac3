"""States between requests and between processes: stale slots, prefix checkpoints, hand-over, other tensor parallelism.

Gates are weak, so that a dropped or misplaced state shows hundreds of tokens later.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import replace

import pytest
import torch

from rapidkda.serving import (
    KDALayer,
    Rollback,
    StatePool,
    StateShape,
    StepRequest,
    checkpoint_offsets,
    export_state,
    import_state,
    merge_states,
    split_state,
    usable_prefix,
    warn_if_unreachable,
)
from rapidkda.testing.tolerances import relative_error

from .driver import Driver
from .oracle import TARGET, WISH, State, changed_slots, make_layer, resting_state

OUT = TARGET.out
STATE = TARGET.state
FORMS: tuple[Rollback, ...] = ("replay", "slots")


def assert_state(driver: Driver, slot: int, wanted: State) -> None:
    got = resting_state(driver.pool, slot)
    assert relative_error(got.recurrent, wanted.recurrent) <= STATE
    assert relative_error(got.history, wanted.history) <= STATE


@pytest.mark.parametrize("rollback", FORMS)
def test_a_fresh_request_never_sees_the_last_tenant(rollback: Rollback) -> None:
    """has_initial_state = [no, yes, no] over NaN slots, lengths 3, 64 and 0: selected, never multiplied."""
    driver = Driver(rollback=rollback)
    state = driver.prefill("old", driver.hidden(30))
    records = [
        StepRequest("new", "prefill", 3, driver.pool.allocate("new"), has_initial_state=False),
        StepRequest("old", "prefill", 64, driver.slots("old")),
        StepRequest("empty", "prefill", 0, driver.pool.allocate("empty"), has_initial_state=False),
    ]
    inputs: dict[Hashable, torch.Tensor] = {r.request_id: driver.hidden(r.num_tokens) for r in records}
    got = driver.step(*records, inputs=inputs)
    for name, start in (("new", driver.oracle.fresh()), ("old", state)):
        wanted, states = driver.oracle.run(inputs[name], start)
        assert relative_error(got[name], wanted) <= OUT
        assert_state(driver, driver.slots(name)[0], states[-1])
    empty = resting_state(driver.pool, driver.slots("empty")[0])
    assert not empty.recurrent.any()
    assert not empty.history.any()


@pytest.mark.parametrize("chunks", [[512], [128] * 4, [7, 130, 375], [1] * 8 + [504]])
def test_any_chunking_of_a_prompt(chunks: list[int]) -> None:
    driver = Driver()
    hidden = driver.hidden(512)
    slots = driver.pool.allocate("a")
    parts, start = [], 0
    for count in chunks:
        rows = hidden[start : start + count]
        parts.append(
            driver.step(StepRequest("a", "prefill", count, slots, has_initial_state=start > 0), inputs={"a": rows})["a"]
        )
        start += count
    wanted, states = driver.oracle.run(hidden, driver.oracle.fresh())
    assert relative_error(torch.cat(parts), wanted) <= OUT
    assert_state(driver, slots[0], states[-1])


@pytest.mark.parametrize("rollback", FORMS)
def test_checkpoints_of_many_requests_in_one_launch(rollback: Rollback) -> None:
    """Lengths 150, 64, 63 and 200, a checkpoint every 64 tokens: 2, 1, 0 and 3 of them, each the state at its token."""
    driver = Driver(rollback=rollback)
    records, expected = [], {}
    inputs: dict[Hashable, torch.Tensor] = {}
    for name, count in (("a", 150), ("b", 64), ("c", 63), ("d", 200)):
        offsets = checkpoint_offsets(0, count, 64)
        targets = driver.pool.allocate(("prefix", name), len(offsets)) if offsets else ()
        slots = driver.pool.allocate(name)
        inputs[name] = driver.hidden(count)
        records.append(
            StepRequest(
                name, "prefill", count, slots, has_initial_state=False, checkpoints=tuple(zip(offsets, targets))
            )
        )
        states = driver.oracle.run(inputs[name], driver.oracle.fresh())[1]
        expected.update({slot: states[offset - 1] for offset, slot in zip(offsets, targets)})
    assert [len(record.checkpoints) for record in records] == [2, 1, 0, 3]
    driver.step(*records, inputs=inputs)
    for slot, state in expected.items():
        assert_state(driver, slot, state)


@pytest.mark.parametrize("start", [0, 48])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_resuming_from_a_checkpoint_equals_a_straight_run(start: int, kind: str) -> None:
    """Two requests that share a prefix start from its checkpoint at once and leave it as it is."""
    driver = Driver()
    prompt = driver.hidden(200)
    slots = driver.pool.allocate("cold")
    if start:
        driver.step(
            StepRequest("cold", "prefill", start, slots, has_initial_state=False), inputs={"cold": prompt[:start]}
        )
    (target,) = driver.pool.allocate("prefix", 1)
    taken = checkpoint_offsets(start, 200 - start, 128)
    record = StepRequest(
        "cold", "prefill", 200 - start, slots, has_initial_state=start > 0, checkpoints=((taken[0], target),)
    )
    driver.step(record, inputs={"cold": prompt[start:]})
    kept = [value.clone() for value in (driver.pool.layers[0].recurrent[target], driver.pool.layers[0].conv[target])]
    count = 1 if kind == "decode" else 72
    records, inputs = [], {}
    for name in ("warm", "other"):
        rows = prompt[128 : 128 + count] if name == "warm" else driver.hidden(count)
        inputs[name] = rows
        records.append(StepRequest(name, kind, count, driver.pool.allocate(name), read_slot=target))  # type: ignore[arg-type]
    got = driver.step(*records, inputs=inputs)
    straight, states = driver.oracle.run(prompt[: 128 + count], driver.oracle.fresh())
    assert relative_error(got["warm"], straight[128:]) <= OUT
    assert_state(driver, driver.slots("warm")[0], states[-1])
    for name in ("warm", "other"):
        following = driver.hidden(2)
        more = driver.step(StepRequest(name, "verify", 2, driver.slots(name)), inputs={name: following})[name]
        after = driver.oracle.run(inputs[name], states[127])[1][-1]
        assert relative_error(more, driver.oracle.run(following, after)[0]) <= OUT
    now = (driver.pool.layers[0].recurrent[target], driver.pool.layers[0].conv[target])
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(kept, now))


def test_a_prefix_is_as_long_as_its_shortest_cache() -> None:
    assert usable_prefix(128, []) == 0
    assert usable_prefix(128, [64]) == 64
    assert usable_prefix(128, [64, 128, 192]) == 128
    assert usable_prefix(100, [64, 128]) == 64
    assert usable_prefix(0, [64]) == 0


def test_a_checkpoint_that_cannot_exist_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rapidkda"):
        assert warn_if_unreachable(100, 128)
        assert "no prefix checkpoint can exist for a prompt of 100 tokens" in caplog.text
        assert not warn_if_unreachable(128, 128)
        caplog.clear()
        assert checkpoint_offsets(7, 200, 64) == ()
        assert "starts at token 7" in caplog.text
    assert checkpoint_offsets(32, 200, 64) == (32, 96, 160)
    assert checkpoint_offsets(64, 63, 64) == ()
    with pytest.raises(ValueError, match="interval"):
        checkpoint_offsets(0, 100, 24)


@pytest.mark.parametrize("rollback", FORMS)
@pytest.mark.parametrize("open_tokens", [0, 1, 3])
def test_hand_over_between_pools(rollback: Rollback, open_tokens: int) -> None:
    """65 tokens here, drafts still open, 5 tokens there: equal to one process, however often it is imported."""
    here, there = Driver(rollback=rollback), Driver(rollback=rollback)
    state = here.prefill("a", here.hidden(65))
    there.pool.allocate("somebody else")
    if open_tokens:
        drafts = here.hidden(open_tokens)
        here.step(StepRequest("a", "verify", open_tokens, here.slots("a")), inputs={"a": drafts})
        state = here.oracle.run(drafts, state)[1][0]
    before = here.snapshot()
    blob = export_state(here.pool, here.slots("a"), open_tokens)
    assert not changed_slots(here.pool, before)
    slots = there.pool.allocate("a")
    for _ in range(2):
        import_state(there.pool, slots, blob, "a")
    told = min(open_tokens, 1)
    for _ in range(5):
        hidden = there.hidden(1)
        got = there.step(StepRequest("a", "decode", 1, slots, accepted=told), inputs={"a": hidden})["a"]
        wanted, states = there.oracle.run(hidden, state)
        state, told = states[-1], 0
        assert relative_error(got, wanted) <= OUT


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_deferred_records_leave_with_the_state(steps: int) -> None:
    """An exported state holds what was accepted before the open drafts, wherever its pool kept that, so it goes into a
    pool of any number of records."""
    layer = make_layer(1)
    drivers = [Driver(layer, max_drafts=2, record_rows=rows) for rows in (3, 4, 9)]
    blobs = []
    for driver in drivers:
        state = driver.prefill("a", driver.hidden(9))
        told = 0
        for step in range(steps):
            count = 1 + step % 3
            hidden = driver.hidden(count)
            driver.step(StepRequest("a", "verify", count, driver.slots("a"), accepted=told), inputs={"a": hidden})
            before, after = state, driver.oracle.run(hidden, state)[1]
            told = max(1, count - 1)
            state = after[told - 1]
        whole = driver.snapshot()
        blobs.append(export_state(driver.pool, driver.slots("a"), count))
        assert not changed_slots(driver.pool, whole)
        assert relative_error(blobs[-1].layers[0]["recurrent"][:, 0].transpose(-1, -2), before.recurrent.cpu()) <= STATE
    for driver in drivers:
        for blob in blobs:
            name = f"from {blob.shape.records_per_slot}"
            slots = driver.pool.allocate(name)
            driver.pool.fill(slots, float("nan"))
            import_state(driver.pool, slots, blob, name)
            for kind, count, told_now, start in (("verify", 3, told, state), ("decode", 1, 2, None)):
                hidden = driver.hidden(count)
                record = StepRequest(name, kind, count, slots, accepted=told_now)  # type: ignore[arg-type]
                got = driver.step(record, inputs={name: hidden})[name]
                wanted, after = driver.oracle.run(hidden, after[1] if start is None else start)
                assert relative_error(got, wanted) <= OUT


@pytest.mark.parametrize("part", ["recurrent", "conv_q", "conv_k", "conv_v", "records"])
def test_a_state_with_a_missing_part_is_refused(part: str) -> None:
    driver = Driver()
    driver.prefill("a", driver.hidden(9))
    driver.step(StepRequest("a", "verify", 2, driver.slots("a")), inputs={"a": driver.hidden(2)})
    blob = export_state(driver.pool, driver.slots("a"), 2)
    broken = replace(blob, layers=tuple({k: v for k, v in layer.items() if k != part} for layer in blob.layers))
    slots = driver.pool.allocate("b")
    before = driver.snapshot()
    with pytest.raises(ValueError, match=part):
        import_state(driver.pool, slots, broken, "b")
    short = replace(blob, layers=tuple({**layer, part: layer[part][:1]} for layer in blob.layers))
    with pytest.raises(ValueError, match=part):
        import_state(driver.pool, slots, short, "b")
    with pytest.raises(ValueError, match="layers"):
        import_state(driver.pool, slots, replace(blob, layers=()), "b")
    assert not changed_slots(driver.pool, before)


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_open_drafts_are_not_lost_on_the_way_out(wrong: int) -> None:
    driver = Driver()
    driver.prefill("a", driver.hidden(9))
    driver.step(StepRequest("a", "verify", 2, driver.slots("a")), inputs={"a": driver.hidden(2)})
    with pytest.raises(ValueError, match=rf"open_drafts.*2 tokens that are open for 'a', got {wrong}"):
        export_state(driver.pool, driver.slots("a"), wrong)


def test_a_state_goes_only_where_it_fits() -> None:
    driver = Driver()
    driver.prefill("a", driver.hidden(9))
    blob = export_state(driver.pool, driver.slots("a"))
    slots = driver.pool.allocate("b")
    for wrong in ((), (99,), (driver.pool.pad_slot,)):
        with pytest.raises(ValueError, match="slots"):
            import_state(driver.pool, wrong, blob)
    with pytest.raises(ValueError, match="open_drafts"):
        export_state(driver.pool, slots, 5)
    other = StatePool(replace(driver.pool.shape, conv_width=3), 4)
    with pytest.raises(ValueError, match="conv_width"):
        import_state(other, (1,), blob)
    # settled states move between the forms of rollback and between draft limits
    for shape in (replace(driver.pool.shape, rollback="slots"), replace(driver.pool.shape, max_drafts=0)):
        pool = StatePool(shape, 4)
        import_state(pool, (2,), blob)
        states = driver.pool.layers[0].recurrent
        assert torch.equal(
            pool.layers[0].recurrent[2], states[driver.slots("a")[0]].to(pool.layers[0].recurrent.device)
        )


def labelled_pools(parts: int, heads: int = 8, dim: int = 4) -> list[StatePool]:
    """Ranks whose convolution channels hold their number in the unsharded order q | k | v, channel by channel."""
    shape = StateShape(heads=heads // parts, key_dim=dim, value_dim=dim, max_drafts=2, conv_dtype=torch.float32)
    pools = []
    for rank in range(parts):
        pool = StatePool(shape, 3)
        own = torch.arange(heads).chunk(parts)[rank]
        channels = torch.cat([(part * heads + own)[:, None] * dim + torch.arange(dim) for part in range(3)]).flatten()
        pool.layers[0].conv[1] = channels.float() + torch.arange(shape.conv_length)[:, None] * 1000
        pool.layers[0].recurrent[1] = own.float()[:, None, None]
        assert pool.layers[0].records is not None
        pool.layers[0].records[1, :3] = own.float()[None, :, None]
        pools.append(pool)
    return pools


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 4), (4, 2), (2, 1), (8, 2), (2, 2)])
def test_states_move_between_tensor_parallel_sizes(source: int, target: int) -> None:
    """q, k and v are three ranges of heads: each rank gets its own heads' channels of all three."""
    whole = merge_states([export_state(pool, (1,), 3) for pool in labelled_pools(source)])
    for wanted, part in zip(labelled_pools(target), split_state(whole, target), strict=True):
        pool = StatePool(wanted.shape, 3)
        import_state(pool, (1,), part)
        for got, expected in zip(pool.layers[0].tensors().values(), wanted.layers[0].tensors().values(), strict=True):
            assert torch.equal(got[1], expected[1])


def test_a_running_request_moves_from_two_ranks_to_four() -> None:
    """Prefill on two ranks, go on with four: the sum of the four outputs is the unsharded layer's."""
    whole = make_layer(4, heads=4)
    outputs = {}
    for sizes in ((1, 1), (2, 4)):
        ranks = [Driver(rank_of(whole, rank, sizes[0])) for rank in range(sizes[0])]
        for driver in ranks:
            driver.prefill("a", driver.hidden(40))
        blobs = [export_state(driver.pool, driver.slots("a")) for driver in ranks]
        moved = []
        for rank, part in enumerate(split_state(merge_states(blobs), sizes[1])):
            driver = Driver(rank_of(whole, rank, sizes[1]))
            driver.hidden(40)
            slots = driver.pool.allocate("a")
            import_state(driver.pool, slots, part, "a")
            moved.append(driver.step(StepRequest("a", "prefill", 9, slots), inputs={"a": driver.hidden(9)})["a"])
        outputs[sizes] = torch.stack(moved).sum(0)
    assert relative_error(outputs[2, 4], outputs[1, 1]) <= OUT
    with pytest.raises(ValueError, match="parts"):
        split_state(merge_states(blobs), 3)
    with pytest.raises(ValueError, match="rank 1"):
        merge_states([blobs[0], replace(blobs[0], open_drafts=1)])
    assert blobs[0].shape.record_rows is None
    merge_states([blobs[0], replace(blobs[1], shape=replace(blobs[1].shape, record_rows=5))])


def rank_of(whole: KDALayer, rank: int, size: int) -> KDALayer:
    """One rank of a layer, through checkpoint names."""
    heads, dim = whole.num_heads, whole.head_dim
    width = heads * dim
    q, k, v, f_a, g_a, b, _ = whole.in_proj.split([width, width, width, *whole._splits[1:]])
    tensors = {
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "f_a_proj.weight": f_a,
        "g_a_proj.weight": g_a,
        "b_proj.weight": b,
        "f_b_proj.weight": whole.f_b_proj,
        "g_b_proj.weight": whole.g_b_proj,
        "conv1d.weight": whole.conv_weight,
        "A_log": whole.A_log,
        "dt_bias": whole.dt_bias,
        "o_norm.weight": whole.o_norm,
        "o_proj.weight": whole.o_proj,
    }
    layer = KDALayer(
        whole.hidden_size,
        heads,
        dim,
        dtype=whole.in_proj.dtype,
        device=whole.in_proj.device,
        tp_rank=rank,
        tp_size=size,
        backends=WISH,
    )
    layer.load_weights({name: value.data for name, value in tensors.items()})
    return layer
