"""The FlashKDA adapter, driven on a CPU by a stand-in for the extension that is as strict as the real one."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from contract import test_contract  # noqa: F401  registers the checks
from contract.cases import CASES, matching
from contract.guards import StatePool, all_zero, check_run, run_prefill, same_bits, within
from contract.target import Target
from rapidkda import BackendUnavailable, Request, Sizes, dispatch, reference
from rapidkda.backends import flashkda
from rapidkda.device import CPU, Device
from rapidkda.testing import Shape, bar, make_inputs, worst_state_error

# Kinds of contract cases with raw inputs, bfloat16 and the bounded gate among their parameters.
SERVED = ("shapes", "regimes", "gate", "B09", "B17", "B29", "B36", "strides")

TARGET = Target("flashkda", torch.device("cpu"), torch.bfloat16)


class StandIn:
    """Takes what the extension takes: one packed run, dense, bfloat16, no empty sequence."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def workspace_bytes(self, tokens: int, heads: int, sequences: int) -> int:
        return 256 * (tokens * heads + sequences)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        out: Tensor,
        workspace: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float,
        initial: Tensor,
        final: Tensor,
        ends: Tensor,
    ) -> None:
        count, heads = q.shape[1:3]
        for name, x in {"q": q, "k": k, "v": v, "g": g, "out": out}.items():
            assert x.is_contiguous(), name
            assert x.shape == (1, count, heads, 128), name
            assert x.dtype == torch.bfloat16, name
        assert beta.shape == (1, count, heads)
        assert beta.dtype == torch.bfloat16
        assert A_log.shape == (heads,)
        assert dt_bias.shape == (heads, 128)
        assert A_log.dtype == dt_bias.dtype == torch.float32
        assert ends.dtype == torch.int64
        assert ends[0] == 0
        assert ends[-1] == count
        assert (ends.diff() > 0).all(), "empty sequences hang it"
        sequences = len(ends) - 1
        assert initial.shape == final.shape == (sequences, heads, 128, 128)
        assert initial.is_contiguous()
        assert initial.dtype == final.dtype
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= self.workspace_bytes(count, heads, sequences)
        self.calls.append({"out": out, "q": q, "sequences": sequences})
        o, states = reference.kda(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial,
            cu_seqlens=ends,
            use_qk_l2norm=True,
            use_gate=True,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            use_beta_sigmoid=True,
            state_v_first=True,
        )
        out.copy_(o)
        final.copy_(states)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in in place of the extension, on a machine whose CPU counts as the right GPU."""
    fake = StandIn()
    unmet = flashkda.FlashKdaBackend.unmet
    monkeypatch.setattr(flashkda, "find_extension", lambda: flashkda.Extension(fake.forward, fake.workspace_bytes))
    monkeypatch.setattr(flashkda, "missing_package", lambda: None)
    monkeypatch.setattr(
        flashkda.FlashKdaBackend,
        "unmet",
        lambda self, request: [reason for reason in unmet(self, request) if "NVIDIA" not in reason],
    )
    dispatch.resolve_cached.cache_clear()
    yield fake
    dispatch.resolve_cached.cache_clear()


SHAPE = Shape("flashkda", (20, 1, 0, 33), 2)


@pytest.mark.parametrize("name", [case.id for case in matching(*SERVED)])
def test_contract_case(stand_in: StandIn, name: str) -> None:
    """Every check of the contract suite that FlashKDA can be asked for."""
    try:
        CASES[name].run(TARGET)
    except BackendUnavailable as refused:
        pytest.skip(str(refused))


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("gaps", [True, False])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_segments_anywhere(stand_in: StandIn, v_first: bool, gaps: bool, state_dtype: torch.dtype) -> None:
    """Scattered segments, strided operands, stale slots, an empty and a fresh segment, both layouts and dtypes."""
    inputs = make_inputs(SHAPE, "slow", dtype=torch.bfloat16, layout="fused", gaps=gaps)
    run = run_prefill(TARGET, inputs, v_first=v_first, state_dtype=state_dtype, fresh=[1, 2], poison=True)
    check_run(run, inputs, TARGET.case_bar(state_dtype))
    all_zero("state of the empty fresh segment", run.pool.view[run.slots[2]])
    assert [call["sequences"] for call in stand_in.calls] == [3]


def test_packed_dense_operands_are_not_copied(stand_in: StandIn) -> None:
    inputs = make_inputs(Shape("packed", (9, 4), 2), "fast", dtype=torch.bfloat16)
    out = torch.full_like(inputs.v, float("nan"))
    run = run_prefill(TARGET, inputs, out=out)
    check_run(run, inputs, bar("fast", torch.bfloat16))
    assert stand_in.calls[0]["q"].data_ptr() == inputs.q.data_ptr()
    assert stand_in.calls[0]["out"].data_ptr() == out.data_ptr()


def test_padding_rows(stand_in: StandIn) -> None:
    """Padding among the segments: zero outputs whatever its inputs are, no state read or written."""
    inputs = make_inputs(Shape("padding", (5, 1, 7), 2), "slow", dtype=torch.bfloat16)
    inputs.v[5] = float("nan")
    pool = StatePool(TARGET, 6, inputs)
    pool.put_states([4, 2], inputs.states[[0, 2]])
    out = TARGET.prefill(inputs, state=pool.view, slots=TARGET.index([4, -1, 2]))
    all_zero("outputs of the padding row", out[5])
    _, want = inputs.expected(sequences=[0, 2])
    within("states", worst_state_error(pool.states([4, 2]), want), TARGET.case_bar().state)
    pool.unchanged([4, 2])


def test_absent_gate_parameters_are_zeros(stand_in: StandIn) -> None:
    inputs = make_inputs(Shape("absent", (9,), 2), "fast", dtype=torch.bfloat16)
    inputs.A_log, inputs.dt_bias = None, None
    check_run(run_prefill(TARGET, inputs), inputs, TARGET.case_bar())


def test_workspace_is_the_extension_s(stand_in: StandIn) -> None:
    sizes = Sizes(tokens=100, segments=3, heads=2, value_heads=2)
    needed = dispatch.load("flashkda").workspace_bytes("prefill", sizes)
    assert needed == stand_in.workspace_bytes(100, 2, 3)
    inputs = make_inputs(Shape("workspace", (20, 3), 2), "slow", dtype=torch.bfloat16)
    small = torch.zeros(stand_in.workspace_bytes(23, 2, 2) - 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="workspace must have at least"):
        TARGET.prefill(inputs, workspace=small)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    aligned = memory[-memory.data_ptr() % 256 :]
    same_bits("outputs", TARGET.prefill(inputs, workspace=aligned), TARGET.prefill(inputs))


REFUSALS = {
    "decode only here": ({"op": "decode"}, "prefill only"),
    "cpu": ({"device": CPU}, "NVIDIA GPU"),
    "sm80": ({"device": Device("nvidia", "A100", (8, 0))}, "capability 9, 10, 12"),
    "fp16": ({"dtype": torch.float16}, "q must be bfloat16"),
    "float32 gate": ({"gate_dtype": torch.float32}, "g must be bfloat16"),
    "float32 beta": ({"beta_dtype": torch.float32}, "beta must be bfloat16"),
    "dim": ({"key_dim": 64}, "head dims must be 128"),
    "softplus": ({"gate": "softplus"}, "lower_bound"),
    "activated gate": ({"gate": "log_decay"}, "lower_bound"),
    "states": ({"state_dtype": torch.float16}, "states must be"),
    "groups": ({"grouped_values": True}, "value heads"),
    "gradient": ({"requires_grad": True}, "gradient"),
    "checkpoints": ({"checkpoints": True}, "checkpoints"),
    "keys": ({"raw_keys": False}, "use_qk_l2norm_in_kernel"),
    "beta": ({"raw_beta": False}, "use_beta_sigmoid_in_kernel"),
    "doubled beta": ({"neg_eigval": True}, "allow_neg_eigval"),
}


@pytest.mark.parametrize(("change", "phrase"), REFUSALS.values(), ids=REFUSALS)
def test_each_requirement_is_named(change: dict[str, Any], phrase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashkda, "find_extension", lambda: flashkda.Extension(lambda *_: None, lambda *_: 0))
    monkeypatch.setattr(flashkda, "missing_package", lambda: None)
    hopper: dict[str, Any] = {"op": "prefill", "device": Device("nvidia", "H200", (9, 0))}
    assert flashkda.FlashKdaBackend().unmet(Request(**hopper)) == []
    unmet = flashkda.FlashKdaBackend().unmet(Request(**(hopper | change)))
    assert len(unmet) == 1
    assert phrase in unmet[0]


def test_extension_of_its_own_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash_kda` takes keywords and allocates its own scratch."""
    fake, seen = StandIn(), {}
    package: Any = types.ModuleType("flash_kda")

    def fwd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, out: Tensor, **rest: Any) -> None:
        seen.update(rest)
        scratch = torch.empty(1 << 20, dtype=torch.uint8)
        gate = rest["A_log"], rest["dt_bias"], rest["lower_bound"]
        states = rest["initial_state"], rest["final_state"], rest["cu_seqlens"]
        fake.forward(q, k, v, g, beta, scale, out, scratch, *gate, *states)

    package.fwd = fwd
    package.__spec__ = importlib.util.spec_from_loader("flash_kda", loader=None)
    monkeypatch.setitem(sys.modules, "flash_kda", package)
    unmet = flashkda.FlashKdaBackend.unmet
    monkeypatch.setattr(
        flashkda.FlashKdaBackend, "unmet", lambda self, r: [x for x in unmet(self, r) if "NVIDIA" not in x]
    )
    dispatch.resolve_cached.cache_clear()
    inputs = make_inputs(SHAPE, "slow", dtype=torch.bfloat16)
    check_run(run_prefill(TARGET, inputs), inputs, TARGET.case_bar())
    assert set(seen) == {"A_log", "dt_bias", "lower_bound", "initial_state", "final_state", "cu_seqlens"}
    dispatch.resolve_cached.cache_clear()


def test_no_extension_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "vllm._flashkda_C, or flash_kda" in str(flashkda.find_extension())


def test_a_machine_without_the_gpu_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whether a package is there is asked; importing vLLM takes long, and may fail without its GPU."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "vllm" else None)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would raise
    unmet = flashkda.FlashKdaBackend().unmet(Request("prefill", CPU))
    assert unmet == ["needs an NVIDIA GPU, got CPU"]
    broken = flashkda.FlashKdaBackend().unmet(Request("prefill", Device("nvidia", "H200", (9, 0))))
    assert len(broken) == 1
    assert "vllm._flashkda_C cannot be imported" in broken[0]
