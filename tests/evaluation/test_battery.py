"""The battery on the model that ships: it passes a healthy backend and fails every broken one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rapidkda.dispatch import load
from rapidkda.evaluation import Battery, Models, Sizes, Spans, by_instrument
from rapidkda.evaluation.operands import NarrowOperands

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
