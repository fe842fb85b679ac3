"""A mixed step, and the step after it, on every backend that runs here (Triton's on a CPU with TRITON_INTERPRET=1)."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch
from torch import Tensor

from rapidkda.dispatch import REGISTRY
from rapidkda.problem import GateKind
from rapidkda.serving import KDALayer, Rollback, StepRequest
from rapidkda.testing.tolerances import relative_error

from .driver import Driver
from .oracle import make_layer, resting_state, wish_or_skip

BAR = 2e-2  # projections, convolution, KDA, norm and output each round once to bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layer_on(backend: str, device: str, lower_bound: float | None) -> KDALayer:
    dim = 64 if device == "cpu" else 128
    gate: GateKind = "softplus" if lower_bound is None else "bounded"
    backends = wish_or_skip(backend, device, dim, (gate,))
    return make_layer(
        1,
        heads=1 if device == "cpu" else 4,
        dim=dim,
        dtype=torch.bfloat16,
        lower_bound=lower_bound,
        device=device,
        backends=backends,
    )


@pytest.mark.parametrize("rollback", ["replay", "slots"])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", list(REGISTRY))
def test_a_mixed_step_and_the_one_after(
    backend: str, device: str, lower_bound: float | None, rollback: Rollback
) -> None:
    layer = layer_on(backend, device, lower_bound)
    driver = Driver(layer, rollback=rollback, max_drafts=2, slots=14)
    states = {name: driver.prefill(name, driver.hidden(5)) for name in ("a", "b")}
    states["c"] = driver.oracle.fresh()
    (target,) = driver.pool.allocate("prefix", 1)
    records = [
        StepRequest("a", "decode", 1, driver.slots("a")),
        StepRequest.padding(1),
        StepRequest(
            "c", "prefill", 17, driver.pool.allocate("c"), has_initial_state=False, checkpoints=((16, target),)
        ),
        StepRequest("b", "verify", 3, driver.slots("b")),
    ]
    inputs: dict[Hashable, Tensor] = {r.request_id: driver.hidden(r.num_tokens) for r in records if r.slots}
    got = driver.step(*records, inputs=inputs)
    after = {}
    for name, state in states.items():
        wanted, after[name] = driver.oracle.run(inputs[name], state)
        assert relative_error(got[name].cpu(), wanted.cpu()) <= BAR
    for slot, wanted_state in ((target, after["c"][15]), (driver.slots("c")[0], after["c"][16])):
        resting = resting_state(driver.pool, slot)
        assert relative_error(resting.recurrent.cpu(), wanted_state.recurrent.cpu()) <= BAR
        assert relative_error(resting.history.cpu(), wanted_state.history.cpu()) <= BAR
    records = [
        StepRequest("b", "decode", 1, driver.slots("b"), accepted=2),
        StepRequest("a", "prefill", 2, driver.slots("a")),
        StepRequest("d", "prefill", 1, driver.pool.allocate("d"), read_slot=target),
    ]
    inputs = {record.request_id: driver.hidden(record.num_tokens) for record in records}
    got = driver.step(*records, inputs=inputs)
    for name, state in (("b", after["b"][1]), ("a", after["a"][0]), ("d", after["c"][15])):
        assert relative_error(got[name].cpu(), driver.oracle.run(inputs[name], state)[0].cpu()) <= BAR


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", list(REGISTRY))
def test_deferred_decodes_and_an_ordinary_one(backend: str, device: str, lower_bound: float | None) -> None:
    """Two requests, one a token behind the other, for long enough that both store their states."""
    driver = Driver(layer_on(backend, device, lower_bound), max_drafts=0, record_rows=3, slots=6)
    states = {name: driver.prefill(name, driver.hidden(5)) for name in ("a", "b")}
    assert driver.pool.slots is not None
    for step in range(6):
        records = [
            StepRequest(
                name,
                "decode" if step in (0, 5) and name == "b" else "verify",
                1,
                driver.slots(name),
                accepted=driver.pool.slots.open_drafts(name),
            )
            for name in states
        ]
        inputs: dict[Hashable, Tensor] = {name: driver.hidden(1) for name in states}
        got = driver.step(*records, inputs=inputs)
        for name, state in states.items():
            wanted, after = driver.oracle.run(inputs[name], state)
            assert relative_error(got[name].cpu(), wanted.cpu()) <= BAR
            states[name] = after[-1]
    resting = resting_state(driver.pool, driver.slots("b")[0])
    assert relative_error(resting.recurrent.cpu(), states["b"].recurrent.cpu()) <= BAR
