"""The plugin on the real layer classes and metadata builders of an installed vLLM; run by test_installed.py.

Layers are built by vLLM's own constructors in a process group of one and run through vLLM's forward context, on the
torch backend and on the CPU. What has a GPU form only is replaced: the output norm, 0.25's convolution, pinned memory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from torch import Tensor, nn
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

sys.path.insert(0, str(Path(__file__).parents[2]))

from integrations.vllm.driver import CHANNELS, DIM, HEADS, SLOTS, Driver, Part, Request
from integrations.vllm.test_real_builder import Common
from integrations.vllm.test_steps import check
from rapidkda.integrations.vllm import metadata as steps
from rapidkda.integrations.vllm import plugin, wrap
from rapidkda.integrations.vllm.seams import KIMI, SEAMS
from rapidkda.testing.tolerances import case_bar

RELEASE = vllm.__version__.split("+")[0]
SEAM = SEAMS.get(RELEASE)
pytestmark = pytest.mark.skipif(SEAM is None, reason=f"vLLM {RELEASE} is not one that the plugin serves")
LAYERS = range(len(SEAM.layers) if SEAM else 0)
SEPARATE = bool(SEAM) and SEAM.layers[0].kind == "kimi_separate"


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    """One rank, the plugin loaded as vLLM loads it."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.utils import torch_utils
    from vllm.v1.attention.backends import utils

    for module in (torch_utils, utils):
        if hasattr(module, "PIN_MEMORY"):
            module.PIN_MEMORY = False
        if hasattr(module, "is_pin_memory_available"):
            module.is_pin_memory_available = lambda: False
    plugin.register()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29531", 0, "gloo")
        initialize_model_parallel(1, 1)
        RealDriver.current = config
        yield


class PlainNorm(nn.Module):
    """vLLM's gated norm as plain tensor code."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.eps = 1e-5

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight * torch.sigmoid(gate)


class RealDriver(Driver):
    """A layer of the installed vLLM with its metadata builder."""

    current: VllmConfig

    def __init__(self, index: int, config: dict[str, Any], num_spec: int) -> None:
        assert SEAM is not None
        self.layer_seam = SEAM.layers[index]
        self.dtype, self.num_spec, self.dim_first = torch.float32, num_spec, False
        self.lower_bound = None if self.layer_seam.model == "Kimi-Linear" else -5.0
        self.current.compilation_config.static_forward_context.clear()
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.float32),
            cache_config=SimpleNamespace(
                mamba_cache_dtype="auto",
                mamba_ssm_cache_dtype="auto",
                mamba_cache_mode="align",
                mamba_block_size=16,
                mamba_page_size_padded=None,
                use_kda_recoverssm=False,
                use_replayssm=False,
            ),
            quant_config=None,
            num_speculative_tokens=num_spec,
            speculative_config=SimpleNamespace(num_speculative_tokens=num_spec) if num_spec else None,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=256, max_num_seqs=8),
            compilation_config=self.current.compilation_config,
            additional_config=config,
        )
        linear = {
            "head_dim": DIM,
            "num_heads": HEADS,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": self.lower_bound,
            "use_full_rank_gate": self.layer_seam.model == "Kimi-K3",
            "kda_layers": [0],
        }
        model = SimpleNamespace(
            hidden_size=64,
            hidden_act="silu",
            rms_norm_eps=1e-5,
            linear_attn_config=linear,
            linear_head_dim=DIM,
            linear_num_heads=HEADS,
            linear_conv_kernel_dim=4,
            linear_lower_bound=self.lower_bound,
        )
        module = importlib.import_module(self.layer_seam.module)
        self.layer = getattr(module, self.layer_seam.cls)(model, self.vllm_config, prefix="model.layers.0.self_attn")
        for parameter in self.layer.parameters():
            parameter.requires_grad_(False).normal_()
        self.layer.o_norm = PlainNorm(self.layer.o_norm.weight)
        shapes = self.layer.get_state_shape()[:2]
        self.conv_cache, self.state_cache = (torch.randn(SLOTS, *shape) for shape in shapes)
        self.layer.kv_cache = (self.conv_cache, self.state_cache)
        self.builder = self.real_builder()

    def real_builder(self) -> Any:
        """The builder with the state that `build` reads: its constructor wants a whole engine."""
        from vllm.v1.kv_cache_interface import MambaSpec

        assert SEAM is not None
        part = SEAM.builders[1 if self.layer_seam.model == "Kimi-K3" else 0]
        cls = getattr(importlib.import_module(part.module), part.cls)
        builder = cls.__new__(cls)
        shapes = tuple(self.layer.get_state_shape()[:2])
        vars(builder).update(
            num_spec=self.num_spec,
            spec_state_slots=self.num_spec + 1,
            use_spec_decode=self.num_spec > 0,
            use_recoverssm=False,
            use_flashinfer_prefill=False,
            use_full_cuda_graph=False,
            gdn_prefill_backend="triton",
            plan_flashinfer_checkpoints=False,
            kv_cache_spec=MambaSpec(block_size=16, shapes=shapes, dtypes=(torch.float32, torch.float32)),
            checkpoint_builder=SimpleNamespace(build=lambda *args: None),
            vllm_config=SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none")),
            _build_chunk_metadata=lambda *args: (None, None),
        )
        return builder

    def metadata(self, parts: list[Part], padding: int = 0) -> Any:
        counts = [part.count for part in parts] + [0] * padding
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        table = [part.request.slots for part in parts] + [[0] * (1 + self.num_spec)] * padding
        context = torch.tensor([part.request.computed for part in parts] + [0] * padding, dtype=torch.int32)
        common = Common(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=context + starts.diff(),
            seq_lens_cpu_upper_bound=context + starts.diff(),
            block_table_tensor=torch.tensor(table, dtype=torch.int32),
            num_reqs=len(counts),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(counts),
            is_prefilling=torch.tensor([p.accept is None and p.count > 1 for p in parts] + [False] * padding),
        )
        drafts = [-1 if part.accept is None else part.count - 1 for part in parts] + [-1] * padding
        accepted = [part.request.accepted for part in parts] + [1] * padding
        if max(drafts) < 0:
            return self.builder.build(0, common)
        return self.builder.build(
            0, common, torch.tensor(accepted, dtype=torch.int32), torch.tensor(drafts, dtype=torch.int32)
        )

    def enter(self, metadata: Any) -> None:
        from vllm import forward_context

        forward_context._forward_context = SimpleNamespace(
            attn_metadata={self.layer.prefix: metadata}, cudagraph_runtime_mode=None
        )


@pytest.fixture(autouse=True)
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPIDKDA_PREFILL_BACKEND", "torch")
    monkeypatch.setenv("RAPIDKDA_DECODE_BACKEND", "torch")
    if SEPARATE:
        sys.path.insert(0, str(Path(__file__).parent / "standins/v0_25/vllm/model_executor/layers/mamba/ops"))
        standin = importlib.import_module("causal_conv1d")
        monkeypatch.setattr(importlib.import_module(KIMI), "causal_conv1d_fn", standin.causal_conv1d_fn)


def run(driver: RealDriver, parts: list[Part], padding: int = 0) -> None:
    before = driver.conv_cache.clone(), driver.state_cache.clone()
    with torch.inference_mode():
        out, metadata = driver.step(parts, padding)
    assert steps.tables(metadata).prefill.host is not None
    used = {slot for part in parts for slot in part.request.slots}
    rest = [slot for slot in range(SLOTS) if slot not in used]
    assert torch.equal(driver.conv_cache[rest], before[0][rest])
    assert torch.equal(driver.state_cache[rest], before[1][rest])
    check(driver, parts, out, case_bar(torch.float32))


@pytest.mark.parametrize("index", LAYERS)
def test_prefill_steps_of_real_layers(index: int) -> None:
    driver = RealDriver(index, {"kda_prefill_backend": "rapidkda"}, num_spec=0 if SEPARATE else 3)
    assert driver.vllm_config.additional_config == {"kda_prefill_backend": "rapidkda"}
    if driver.layer_seam.checkpoints:
        assert driver.layer.get_kv_cache_spec(driver.vllm_config).prefill_checkpoint_alignment == 16
    if SEPARATE:
        a, b, c = (Request([slot]) for slot in (5, 3, 11))
        run(driver, [Part(a, 33), Part(b, 3)])
        run(driver, [Part(b, 1), Part(a, 17), Part(c, 40)])
        return
    a, b, c, d = (Request([first, first + 1, first + 2, first + 3]) for first in (1, 5, 9, 13))
    run(driver, [Part(a, 20), Part(b, 7)])
    run(driver, [Part(c, 30), Part(a, 4, accept=2), Part(d, 5), Part(b, 3, accept=3)])
    run(driver, [Part(a, 2, accept=1), Part(c, 18), Part(b, 4, accept=4), Part(d, 2)])
    run(driver, [Part(c, 3), Part(b, 1, accept=1), Part(a, 4, accept=4)], padding=1)


@pytest.mark.parametrize("index", LAYERS)
def test_real_layers_without_a_wish_keep_their_own_prefill(index: int) -> None:
    driver = RealDriver(index, {"kda_prefill_backend": "triton"}, num_spec=0)
    assert not hasattr(driver.layer, wrap.PLAN)
    assert driver.layer.dt_bias.numel() == CHANNELS


def test_the_real_configuration_class_refuses_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPIDKDA_VLLM", "prefill")
    with pytest.raises(ValueError, match="conflicting backends"):
        VllmConfig(device_config=DeviceConfig(device="cpu"), additional_config={"kda_prefill_backend": "flashkda"})
