"""A prefill starts while the kernel before it ends: it reads nothing too early, and overwrites nothing still read."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rapidkda import ops
from rapidkda.backends.base import Request
from rapidkda.backends.cuda import CudaBackend
from rapidkda.backends.cuda.host import prefill as host
from rapidkda.backends.cuda.host.plan import Plan
from rapidkda.device import Device
from rapidkda.ops import kinds
from rapidkda.segments import Segments
from rapidkda.testing import Shape, make_inputs

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or importlib.util.find_spec("cuda.core") is None:
    pytest.skip("needs a GPU and cuda-core", allow_module_level=True)
DEVICE = torch.device("cuda", torch.cuda.current_device())
UNMET = CudaBackend().unmet(Request("prefill", Device.of(DEVICE)))
if UNMET:
    pytest.skip("; ".join(UNMET), allow_module_level=True)

LENGTHS = (520, 76)  # chunks for every part, and a last one that is not full
STEPS = 3


@pytest.fixture(params=(("whole", 1), ("pair", 1), ("parallel", 2)), ids=lambda form: f"{form[0]}{form[1]}")
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes the planner choose one form for everything."""
    name, parts = request.param
    monkeypatch.setattr(host, "plan", lambda call, sms: Plan(name, parts, 0.0, ()))
    kinds.forget()  # they hold plans
    yield str(name)
    kinds.forget()


class Steps:
    """Steps that write inputs and tables and then prefill four times in place on one pool. The values of each call but
    the first are the outputs of the one before, whose own values its outputs overwrite."""

    def __init__(self, regime: str):
        shape = Shape("steps", LENGTHS, 16)
        made = [make_inputs(shape, regime, dtype=torch.bfloat16, device=DEVICE, seed=n) for n in range(STEPS)]
        self.options = made[0].options()
        self.given = [one.operands() for one in made]
        self.start = made[0].states
        spans = torch.tensor(made[0].spans, dtype=torch.int32, device=DEVICE)
        slots = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
        in_order, turned = (*spans.unbind(1), slots), (*spans.flip(0).unbind(1), slots.flip(0))
        self.tables = [turned if n % 2 else in_order for n in range(STEPS)]
        # What the calls read and write.
        self.live = [x.clone() for x in self.given[0]]
        first, length, self.slots = (x.clone() for x in self.tables[0])
        self.segments = Segments(first, length, max(LENGTHS))
        self.pool = torch.empty((3, *self.start.shape[1:]), device=DEVICE)
        self.outs = [torch.empty_like(self.live[2]) for _ in range(2)]
        self.results = torch.empty((STEPS, *self.outs[0].shape), dtype=torch.bfloat16, device=DEVICE)

    def run(self, pause: Callable[[], None] = lambda: None) -> None:
        self.pool.fill_(0.0)
        self.pool[:2].copy_(self.start)
        for n in range(STEPS):
            into = (self.segments.first_token, self.segments.length, self.slots, *self.live)
            for to, source in zip(into, (*self.tables[n], *self.given[n]), strict=True):
                to.copy_(source)
                pause()
            q, k, values, g, beta = self.live
            for turn in range(4):
                out = self.outs[turn % 2]
                ops.prefill(
                    *(q, k, values, g, beta),
                    **self.options,
                    segments=self.segments,
                    state=self.pool,
                    slots=self.slots,
                    out=out,
                    backend="cuda",
                )
                pause()
                values = out
            self.results[n].copy_(out)

    def taken(self) -> tuple[Tensor, Tensor]:
        return self.results.view(torch.int16).clone(), self.pool.clone()


@pytest.mark.parametrize("regime", ["fast", "slow"])
def test_calls_in_a_row_give_what_calls_apart_give(form: str, regime: str) -> None:
    steps = Steps(regime)
    steps.run(torch.cuda.synchronize)
    want, pool = steps.taken()
    assert bool(torch.isfinite(pool).all())

    def same() -> bool:
        return torch.equal(steps.results.view(torch.int16), want) and torch.equal(steps.pool, pool)

    for _ in range(20):
        steps.results.zero_()
        steps.run()
        assert same()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps.run()
    different = 0
    for _ in range(200):
        steps.results.zero_()
        graph.replay()
        different += not same()
    assert different == 0
