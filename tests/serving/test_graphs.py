"""Tables that are refilled in place: what a captured graph sees, padding rows, and the host's part of a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from rapidkda import dispatch
from rapidkda.backends.base import Request
from rapidkda.device import Device
from rapidkda.serving import BackendWish, StepBatch, StepLimits, StepRequest
from rapidkda.testing.tolerances import relative_error

from .driver import Driver
from .oracle import TARGET, WISH, changed_slots, make_layer, make_workspace

OUT = TARGET.out
LIMITS = StepLimits(max_tokens=24, max_requests=6)
HAS_GPU = torch.cuda.is_available()
FORMS: dict[str, dict[str, Any]] = {
    "replay": {},
    "slots": {"rollback": "slots"},
    "deferred decodes": {"max_drafts": 0, "record_rows": 3},
}


@pytest.mark.parametrize("pad_slot", [-1, 0])
def test_padding_rows_are_zero_and_touch_nothing(pad_slot: int) -> None:
    """Three real rows and five of padding, whatever the hidden rows, the scratch and the pool hold."""
    driver = Driver(pad_slot=pad_slot, limits=LIMITS, slots=10)
    names = ["a", "b", "c"]
    states = {name: driver.prefill(name, driver.hidden(5)) for name in names}
    assert (0 in {driver.slots(name)[0] for name in names}) == (pad_slot == -1)  # slot 0 is real or nobody's
    inputs: dict[Hashable, Tensor] = {name: driver.hidden(1) for name in names}
    before = driver.snapshot()
    records = [
        StepRequest("a", "decode", 1, driver.slots("a")),
        StepRequest.padding(3),
        StepRequest("b", "decode", 1, driver.slots("b")),
        StepRequest("c", "decode", 1, driver.slots("c")),
        StepRequest.padding(2),
    ]
    got = driver.step(*records, inputs=inputs)  # checks that padding rows are exactly zero
    for name in names:
        assert relative_error(got[name], driver.oracle.run(inputs[name], states[name])[0]) <= OUT
    assert changed_slots(driver.pool, before) == {driver.slots(name)[0] for name in names}


def test_a_step_of_padding_only() -> None:
    driver = Driver(limits=LIMITS)
    driver.batch.fill([StepRequest.padding(8)])
    before = driver.snapshot()
    hidden = torch.full_like(driver.hidden(8), float("nan"))
    assert (driver.layer(hidden, driver.batch, driver.pool, driver.workspace) == 0).all()
    driver.batch.fill([])
    assert driver.layer(hidden[:0], driver.batch, driver.pool, driver.workspace).shape == (0, 32)
    assert not changed_slots(driver.pool, before)


def random_steps(
    driver: Driver, kinds: list[str], steps: int, seed: int
) -> list[tuple[list[StepRequest], dict[Hashable, Tensor]]]:
    """A schedule of one kind of mixture over four running requests, with changing slots, counts and batch sizes."""
    choices = random.Random(seed)
    drafts = driver.pool.shape.max_drafts
    names: list[Hashable] = ["a", "b", "c", "d"]
    told = dict.fromkeys(names, 0)
    schedule = []
    for _ in range(steps):
        records, inputs = [], {}
        for name in choices.sample(names, choices.randint(1, 4)):
            kind = choices.choice(kinds)
            count = {"prefill": choices.randint(0, 3), "decode": 1, "verify": choices.randint(1, 1 + drafts)}[kind]
            record = StepRequest(name, kind, count, driver.slots(name), accepted=told[name])  # type: ignore[arg-type]
            records.append(record)
            inputs[name] = driver.hidden(count)
            told[name] = choices.randint(1, count) if kind == "verify" else 0
        schedule.append((records, inputs))
    return schedule


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kinds", [["decode"], ["verify"], ["prefill", "decode", "verify"]])
def test_refilled_fixed_tables_equal_exact_ones(form: str, kinds: list[str]) -> None:
    """Twenty steps through tables that keep their addresses and largest sizes, against freshly sized ones."""
    exact, fixed = Driver(limits=LIMITS, **FORMS[form]), Driver(limits=LIMITS, fixed=True, **FORMS[form])
    for driver in (exact, fixed):
        for name in "abcd":
            driver.prefill(name, driver.hidden(5))
    assert fixed.batch.decode is not None
    assert fixed.batch.verify is not None
    addresses = {fixed.batch.decode.slots.data_ptr(), fixed.batch.verify.segments.length.data_ptr()}
    schedule = random_steps(exact, kinds, 20, seed=1)
    for records, inputs in schedule:
        left = exact.step(*records, inputs=inputs, num_tokens=LIMITS.max_tokens)  # as many rows: same products
        right = fixed.step(*records, inputs=inputs)
        assert fixed.batch.num_tokens == LIMITS.max_tokens
        for name, value in left.items():
            assert torch.equal(value, right[name])
    slots = [slot for name in "abcd" for slot in exact.slots(name)]
    for a, b in zip(exact.pool.layers, fixed.pool.layers, strict=True):
        assert torch.equal(a.recurrent[slots].view(torch.int32), b.recurrent[slots].view(torch.int32))
    assert addresses == {fixed.batch.decode.slots.data_ptr(), fixed.batch.verify.segments.length.data_ptr()}


def test_fixed_tables_are_padding_until_they_are_filled() -> None:
    driver = Driver(limits=LIMITS, fixed=True)
    before = driver.snapshot()
    hidden = torch.full_like(driver.hidden(LIMITS.max_tokens), float("nan"))
    assert (driver.layer(hidden, driver.batch, driver.pool, driver.workspace) == 0).all()
    assert not changed_slots(driver.pool, before)


def test_fixed_tables_take_no_checkpoints() -> None:
    driver = Driver(limits=LIMITS, fixed=True)
    slots, target = driver.pool.allocate("a"), driver.pool.allocate("cp", 1)
    record = StepRequest("a", "prefill", 16, slots, has_initial_state=False, checkpoints=((16, target[0]),))
    with pytest.raises(ValueError, match="max_checkpoints = 0"):
        driver.batch.fill([record])


def test_the_host_lengths_must_be_those_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debug mode compares what the host believes with what the kernels read."""
    monkeypatch.setenv("RAPIDKDA_CHECK", "1")
    driver = Driver(limits=LIMITS)
    driver.prefill("a", driver.hidden(4))
    driver.batch.fill([StepRequest("a", "decode", 1, driver.slots("a"))])
    assert driver.batch.decode is not None
    driver.batch.decode.segments.length[0] = 0
    with pytest.raises(ValueError, match=r"segments\.host"):
        driver.layer(driver.hidden(1), driver.batch, driver.pool, driver.workspace)


def gpu_backend() -> str | None:
    """The fastest backend that runs the test's layers on this GPU."""
    if not HAS_GPU:
        return None
    request = Request("decode", Device.of(torch.device("cuda")), key_dim=64, value_dim=64)
    name = dispatch.resolve(request).name
    return None if name == "torch" else name


@pytest.fixture
def on_gpu() -> Callable[..., Driver]:
    name = gpu_backend()
    if name is None:
        pytest.skip("no backend with capturable kernels here")

    def build(**options: object) -> Driver:
        layer = make_layer(
            hidden=128,
            heads=4,
            dim=128,
            dtype=torch.bfloat16,
            device="cuda",
            backends=BackendWish(prefill=name, decode=name),
        )
        return Driver(layer, **options)  # type: ignore[arg-type]

    return build


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["decode", "verify"])
def test_captured_steps_equal_eager_ones(form: str, kind: str, on_gpu: Callable[..., Driver]) -> None:
    """Capture once, replay 20 steps with other slots, counts, batch sizes and rows in place each time."""
    limits = StepLimits(24, 6, max_prefills=0, max_decodes=6 * (kind == "decode"), max_verifies=6 * (kind == "verify"))
    eager, captured = on_gpu(**FORMS[form]), on_gpu(**FORMS[form])
    for driver in (eager, captured):
        for name in "abcd":
            driver.prefill(name, driver.hidden(5))
    batch = StepBatch(captured.pool, limits, fixed=True)
    workspace = make_workspace(captured.layer, captured.pool, limits, device="cuda")
    hidden = torch.zeros(limits.max_tokens, 128, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which is still copying the tables
    with torch.cuda.stream(side):
        for _ in range(3):  # padding only: warms up and changes nothing
            captured.layer(hidden, batch, captured.pool, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.layer(hidden, batch, captured.pool, workspace)
    for records, inputs in random_steps(eager, [kind], 20, seed=2):
        wanted = eager.step(*records, inputs=inputs, num_tokens=limits.max_tokens)
        batch.fill(records)
        hidden.fill_(float("nan"))
        first = 0
        for record in records:
            hidden[first : first + record.num_tokens] = inputs[record.request_id]
            first += record.num_tokens
        graph.replay()
        first = 0
        for record in records:
            assert torch.equal(out[first : first + record.num_tokens], wanted[record.request_id])
            first += record.num_tokens
        assert (out[first:] == 0).all()


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device(on_gpu: Callable[..., Driver]) -> None:
    """Ten forwards of a mixed step with torch raising on every synchronisation."""
    driver = on_gpu()
    for name in "abc":
        driver.prefill(name, driver.hidden(40))
    records = [
        StepRequest("a", "prefill", 70, driver.slots("a")),
        StepRequest("b", "decode", 1, driver.slots("b")),
        StepRequest("c", "verify", 3, driver.slots("c")),
    ]
    driver.batch.fill(records)
    hidden = driver.hidden(74)
    driver.layer(hidden, driver.batch, driver.pool, driver.workspace)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            driver.layer(hidden, driver.batch, driver.pool, driver.workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_one_layer_resolves_its_backends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the hot path looks for a backend again, or reads a configuration."""
    driver = Driver(make_layer(backends=WISH), limits=LIMITS)
    driver.prefill("a", driver.hidden(4))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("resolved in the hot path")

    monkeypatch.setattr(dispatch, "resolve", refuse)
    monkeypatch.setattr(dispatch, "wish", refuse)
    record = StepRequest("a", "decode", 1, driver.slots("a"))
    driver.step(record, inputs={"a": driver.hidden(1)})
