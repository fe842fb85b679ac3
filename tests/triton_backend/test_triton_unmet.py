"""The backend says what is missing, on any machine, without loading triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rapidkda.backends.base import Request
from rapidkda.backends.triton import TritonBackend
from rapidkda.device import CPU, Device

H200 = Device("nvidia", "H200", (9, 0))


@pytest.fixture(autouse=True)
def not_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("rapidkda.backends.triton._triton_version", lambda: (3, 6))


def unmet(**changes: object) -> str:
    request = Request(**{"op": "prefill", "device": H200, **changes})  # type: ignore[arg-type]
    return "; ".join(TritonBackend().unmet(request))


def test_it_runs_on_the_architectures_it_has_kernels_for() -> None:
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        assert unmet(device=Device("nvidia", "GPU", capability)) == ""
    for arch in ("gfx942", "gfx950"):
        assert unmet(device=Device("amd", "GPU", arch=arch)) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": CPU}, "NVIDIA or AMD GPU"),
        ({"device": Device("nvidia", "T4", (7, 5))}, "compute capability 8.0"),
        ({"device": Device("amd", "MI100", arch="gfx908")}, "gfx942"),
        ({"dtype": torch.float64}, "inputs must be"),
        ({"key_dim": 96}, "key dim must be 64, 128 or 256, got 96"),
        ({"value_dim": 32, "op": "decode"}, "value dim must be 64, 128 or 256, got 32"),
        ({"state_dtype": torch.float16}, "states must be"),
        ({"requires_grad": True}, "gradients"),
    ],
)
def test_what_it_cannot_do_is_named(changes: dict[str, object], reason: str) -> None:
    assert reason in unmet(**changes)


def test_head_sizes_do_not_concern_the_neighbours() -> None:
    assert unmet(op="norm", key_dim=96, value_dim=96) == ""


def test_a_missing_or_old_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapidkda.backends.triton._triton_version", lambda: None)
    assert "triton is not installed" in unmet()
    monkeypatch.setattr("rapidkda.backends.triton._triton_version", lambda: (3, 1))
    assert "got 3.1" in unmet()


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert unmet(device=CPU) == ""


def test_asking_loads_no_triton() -> None:
    code = (
        "import sys; from rapidkda import dispatch; from rapidkda.backends.base import Request; "
        "from rapidkda.device import CPU; dispatch.load('triton').unmet(Request('prefill', CPU)); "
        "sys.exit(any(m.startswith('rapidkda.backends.triton.') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
