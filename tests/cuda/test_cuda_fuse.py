"""Which neighbours a prefill takes on, decided without a GPU."""

from __future__ import annotations

import pytest
import torch

from rapidkda import Segments
from rapidkda.backends.cuda.host import fuse, prefill
from rapidkda.backends.cuda.host.plan import plan_neighbours
from rapidkda.problem import FusedConv, FusedNorm, Gate, PrefillCall, Tokens

HEADS = 16


@pytest.fixture(autouse=True)
def _sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (fuse, prefill):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)


def layer(
    lengths: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    weight: torch.dtype = torch.float32,
    taps: int = 4,
    pool: torch.dtype = torch.bfloat16,
    gate: torch.dtype = torch.bfloat16,
    spare: int = 0,
) -> PrefillCall:
    count, width = sum(lengths), HEADS * 128
    buffer = torch.empty(count, 4 * width + spare, dtype=dtype, device="meta")
    x, z = buffer[:, : 3 * width], buffer[:, 3 * width : 4 * width].unflatten(1, (HEADS, 128))
    q, k, v = (part.unflatten(1, (HEADS, 128)) for part in x.split(width, 1))
    g = torch.empty(count, HEADS, 128, dtype=gate, device="meta")
    call = PrefillCall(
        tokens=Tokens(q, k, v, g, g[..., 0], Gate("bounded", -5.0), True, 1.0, True, 1.0),
        segments=Segments.from_lengths(lengths),
        out=torch.empty_like(v),
        initial=None,
        final=None,
        read_slots=None,
        write_slots=None,
        has_initial_state=None,
        state_v_first=True,
        pad_slot=-1,
        checkpoints=None,
        checkpoint_pool=None,
        workspace=None,
    )
    histories = torch.empty(9, 3, 3 * width, dtype=pool, device="meta")
    call.conv = FusedConv(
        x, torch.empty(3 * width, taps, dtype=weight, device="meta"), histories, True, None, None, None
    )
    call.norm = FusedNorm(z, torch.empty(128, dtype=weight, device="meta"), 1e-5, "sigmoid")
    return call


FULL = [2048] * 8


def test_a_full_device_takes_both_on() -> None:
    call = layer(FULL)
    assert fuse.unfused(call) == {}
    assert prefill.plan(call, 132).form == "whole"


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"weight": torch.bfloat16}, {"conv": "float32 weights", "norm": "float32 weights"}),
        ({"taps": 3}, {"conv": "4 taps"}),
        ({"pool": torch.float32}, {"conv": "bfloat16 histories"}),
        ({"spare": 3}, {"conv": "multiples of 16 bytes", "norm": "multiples of 16 bytes"}),
    ],
)
def test_what_it_cannot_do_is_told(changes: dict[str, object], reasons: dict[str, str]) -> None:
    found = fuse.unfused(layer(FULL, **changes))  # type: ignore[arg-type]
    assert found.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in " ".join(found[name])


def test_few_chains_leave_the_norm_to_itself() -> None:
    """Of a cluster no CTA has all of a row."""
    call = layer([8192])
    found = fuse.unfused(call)
    assert "norm" in found
    assert "the planner expects" in found["norm"][0]
    call.norm = None
    if "conv" in found:
        call.conv = None
    assert prefill.plan(call, 132).form != "whole"


def test_a_cluster_has_no_room_for_a_wide_gate() -> None:
    call = layer([2048] * 4, gate=torch.float32)
    for name in fuse.unfused(call):
        setattr(call, name, None)
    assert call.conv is None or prefill.plan(call, 132).form == "whole"


def test_the_choice_is_the_cheapest() -> None:
    chosen, costs = plan_neighbours(8, 1024, 128, 16, 132, (("conv", 400 << 20), ("norm", 200 << 20)), True)
    assert costs[chosen] == min(costs.values())
    assert set(costs) == {(), ("conv",), ("norm",), ("conv", "norm")}


def test_nothing_to_do_is_left_to_the_operators() -> None:
    assert fuse.unfused(layer([])).keys() == {"conv", "norm"}
