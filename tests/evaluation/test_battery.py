"""The battery on the model that ships: it passes a healthy backend and fails every broken one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rapidkda import Request
from rapidkda.backends import cuda, triton
from rapidkda.device import Device
from rapidkda.dispatch import load
from rapidkda.evaluation import Battery, Models, Sizes, Spans, by_instrument, of_backend
from rapidkda.evaluation.operands import NarrowOperands
from rapidkda.serving.backends import choose

from .broken import BROKEN, Healthy, Passing

SMALL = Sizes(100, 1, Spans(250, 24, 40), (512,), 1, 8, 0, 0, 0, 256)


@pytest.fixture(scope="module")
def battery(trained: Callable[[torch.dtype], Any]) -> Battery:
    return Battery(Models(trained), SMALL)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_backend_is_outside_the_budget(battery: Battery, broken: type[Passing]) -> None:
    found = battery.judge(by_instrument(broken.__name__, broken()))
    assert found.error is None
    assert not found.within


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bf16 operands"])
def test_a_healthy_backend_is_inside_the_budget(battery: Battery, narrow: bool) -> None:
    backend = Healthy()
    instrument = NarrowOperands("narrow", backend, backend, load("torch")) if narrow else backend
    found = battery.judge(by_instrument("healthy", instrument))
    assert found.error is None
    assert found.within, [verdict for verdict in found.verdicts if not verdict.within]


def test_a_backend_without_decode_is_completed_by_one_that_has_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes one backend for decode and both forms of verify; cuda has one of the three."""
    monkeypatch.setattr(cuda, "_missing_packages", lambda: ())
    monkeypatch.setattr(triton, "_triton_version", lambda: (3, 6))
    hopper = Device("nvidia", "NVIDIA H200", (9, 0))
    found = of_backend("cuda", "model", hopper, "bounded")
    assert found.name == "cuda+triton"
    with found.installed() as wish:
        served = {op: choice.name for op, choice in choose(wish, Request("prefill", hopper)).items()}
    assert served["prefill"] == "cuda"
    assert served["decode"] == served["verify"] == served["verify_slots"] == "triton"
