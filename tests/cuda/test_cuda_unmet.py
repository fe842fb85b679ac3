"""Each requirement of the backend is named when it is not met."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rapidkda.backends.base import Request
from rapidkda.backends.cuda import OPERATORS, CudaBackend
from rapidkda.device import CPU, Device
from rapidkda.problem import OPS, Op, Sizes

HOPPER = Device("nvidia", "NVIDIA H200", (9, 0))
GOOD = Request("prefill", HOPPER)


@pytest.mark.parametrize("op", OPERATORS)
def test_a_hopper_is_served_where_the_packages_are(op: Op) -> None:
    pytest.importorskip("cuda.core")
    assert CudaBackend().unmet(replace(GOOD, op=op)) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device": CPU}, "compute capability 9.0"),
        ({"device": Device("nvidia", "NVIDIA A100", (8, 0))}, "compute capability 9.0"),
        ({"device": Device("nvidia", "NVIDIA B200", (10, 0))}, "compute capability 9.0"),
        ({"device": Device("amd", "MI300X", arch="gfx942")}, "compute capability 9.0"),
        ({"dtype": torch.float16}, "bfloat16"),
        ({"dtype": torch.float32}, "bfloat16"),
        ({"key_dim": 64}, "K = V = 128"),
        ({"value_dim": 256}, "K = V = 128"),
        ({"requires_grad": True}, "backward"),
        ({"op": "verify", "rollback": "slots"}, "a slot a position"),
    ],
)
def test_each_unmet_requirement_is_named(change: dict[str, object], word: str) -> None:
    (reason,) = (r for r in CudaBackend().unmet(replace(GOOD, **change)) if word in r)  # type: ignore[arg-type]
    assert word in reason


@pytest.mark.parametrize("op", [op for op in OPS if op not in OPERATORS])
def test_other_operators_are_left_to_other_backends(op: Op) -> None:
    assert any(op in reason for reason in CudaBackend().unmet(replace(GOOD, op=op)))


def test_workspace_covers_context_parallel_plans_only() -> None:
    backend = CudaBackend()
    assert backend.workspace_bytes("prefill", Sizes(16384, 1, 16, 16)) > 0
    assert backend.workspace_bytes("prefill", Sizes(16384, 1, 64, 64)) == 0
    assert backend.workspace_bytes("prefill", Sizes(0, 0, 16, 16)) == 0
    assert backend.workspace_bytes("decode", Sizes(16, 16, 16, 16)) == 0
