"""Runs steps of a stand-in layer as vLLM would, and says what every request should have got, in float64."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rapidkda import reference
from rapidkda.integrations.vllm.seams import SEAMS, LayerSeam

HEADS, DIM, WIDTH = 2, 16, 4
CHANNELS = HEADS * DIM
SLOTS = 24
PADDED_TOKENS = 3  # rows at the end of a step that belong to no request


@dataclass
class Request:
    """A request's inputs so far: x [n, 3*C] before the convolution, g and z [n, C] logits, b [n, H] logits."""

    slots: list[int]
    accepted: int = 1  # tokens accepted of the last verified step
    inputs: list[Tensor] = field(
        default_factory=lambda: [torch.zeros(0, n) for n in (3 * CHANNELS, CHANNELS, CHANNELS, HEADS)]
    )

    @property
    def computed(self) -> int:
        return self.inputs[0].shape[0]


@dataclass
class Part:
    """A request's share of a step: `count` tokens, verified (with `accept` of them accepted afterwards) or not."""

    request: Request
    count: int
    accept: int | None = None
    fresh: list[Tensor] = field(default_factory=list)


class Driver:
    """One layer with its caches and its metadata builder."""

    def __init__(
        self,
        version: str,
        index: int,
        *,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
        lower_bound: float | None = None,
        num_spec: int = 0,
        dim_first: bool = False,
        config: dict[str, Any] | None = None,
    ):
        seam = SEAMS[version]
        self.layer_seam: LayerSeam = seam.layers[index]
        self.dtype, self.lower_bound, self.num_spec = dtype, lower_bound, num_spec
        mamba = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
        mamba.dim_first = dim_first
        self.dim_first = dim_first
        module = importlib.import_module(self.layer_seam.module)
        from vllm.config import VllmConfig

        self.vllm_config = VllmConfig(
            model_config=SimpleNamespace(dtype=dtype),
            additional_config={"kda_prefill_backend": "rapidkda"} if config is None else config,
        )
        model = SimpleNamespace(
            head_dim=DIM,
            num_heads=HEADS,
            num_spec=num_spec,
            state_dtype=state_dtype,
            lower_bound=lower_bound,
            use_recoverssm=False,
        )
        self.layer = getattr(module, self.layer_seam.cls)(model, self.vllm_config, prefix="model.layers.0.self_attn")
        builder = seam.builders[1 if "kimi_k3" in self.layer_seam.module else 0]
        self.builder = getattr(importlib.import_module(builder.module), builder.cls)()
        length = WIDTH - 1 + num_spec
        shape = (SLOTS, 3 * CHANNELS, length) if dim_first else (SLOTS, length, 3 * CHANNELS)
        self.conv_cache = torch.randn(shape).to(dtype)
        self.state_cache = torch.randn(SLOTS, HEADS, DIM, DIM).to(state_dtype)
        self.layer.kv_cache = (self.conv_cache, self.state_cache)

    def metadata(self, parts: list[Part], padding: int = 0) -> Any:
        """What vLLM's builder makes of a step; `padding` requests without tokens trail."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts = [part.count for part in parts] + [0] * padding
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        width = 1 + self.num_spec
        tables = [part.request.slots for part in parts] + [[0] * width] * padding
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            num_computed_tokens=torch.tensor([part.request.computed for part in parts] + [0] * padding),
            block_table_tensor=torch.tensor(tables, dtype=torch.int32),
            num_actual_tokens=int(starts[-1]),
        )
        drafts = [-1 if part.accept is None else part.count - 1 for part in parts] + [-1] * padding
        speculative = any(draft >= 0 for draft in drafts)
        return self.builder.build(
            0,
            common,
            torch.tensor([part.request.accepted for part in parts] + [1] * padding, dtype=torch.int32)
            if speculative
            else None,
            torch.tensor(drafts, dtype=torch.int32) if speculative else None,
        )

    def step(self, parts: list[Part], padding: int = 0) -> tuple[Tensor, Any]:
        """Run one step on fresh inputs; returns core_attn_out [T + padding, H, D] and the metadata."""
        for part in parts:
            part.fresh = [
                torch.randn(part.count, n).to(self.dtype).float() for n in (3 * CHANNELS, CHANNELS, CHANNELS, HEADS)
            ]
        x, g, z, b = (
            torch.cat([*(part.fresh[i] for part in parts), torch.randn(PADDED_TOKENS, width)]).to(self.dtype)
            for i, width in enumerate((3 * CHANNELS, CHANNELS, CHANNELS, HEADS))
        )
        metadata = self.metadata(parts, padding)
        out = torch.full((1, x.shape[0], HEADS, DIM), float("nan"), dtype=self.dtype)
        self.enter(metadata)
        self.layer._forward(**self.arguments(x, g, z, b, out))
        return out[0], metadata

    def enter(self, metadata: Any) -> None:
        """Make the step's metadata what the layer finds in vLLM's forward context."""
        from vllm import forward_context

        forward_context.current.attn_metadata = {self.layer.prefix: metadata}

    def arguments(self, x: Tensor, g: Tensor, z: Tensor, b: Tensor, out: Tensor) -> dict[str, Tensor]:
        """The keywords of the layer's `_forward`; every input is a strided slice, as projections give them."""
        wide = torch.cat([x, b, g], dim=-1)
        x, b = wide[:, : 3 * CHANNELS], wide[None, :, 3 * CHANNELS : 3 * CHANNELS + HEADS]
        g = g.unflatten(-1, (HEADS, DIM))[None]
        if self.layer_seam.kind == "kimi_separate":
            q, k, v = (part.contiguous() for part in x.chunk(3, dim=-1))
            beta = b.float().sigmoid()
            return {
                "q_proj_states": q,
                "k_proj_states": k,
                "v_proj_states": v,
                "g1": g,
                "beta": beta,
                "core_attn_out": out,
            }
        if self.layer_seam.kind == "glm":
            return {"qkv_proj_states": x, "g1": g, "beta": b, "core_attn_out": out}
        return {"mixed_qkv": x, "g1": g, "g2": z.unflatten(-1, (HEADS, DIM)), "beta": b, "core_attn_out": out}

    def expected(
        self, request: Request, fresh: list[Tensor], tokens: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [n, H, D] of the fresh tokens, and state [H, V, K] and convolution history [W-1, 3*C] after them."""
        tokens = fresh[0].shape[0] if tokens is None else tokens
        x, g, z, b = (torch.cat([old, new[:tokens]]) for old, new in zip(request.inputs, fresh, strict=True))
        layer = self.layer
        if self.layer_seam.kind == "kimi_packed":
            weight = layer.conv1d.weight[:, 0]
        else:
            weight = torch.cat([conv.weight[:, 0] for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)])
        convolved, history = reference.causal_conv(x, weight)
        q, k, v = (part.unflatten(-1, (HEADS, DIM))[None].to(self.dtype) for part in convolved.chunk(3, dim=-1))
        out, state = reference.kda(
            q,
            k,
            v,
            g.unflatten(-1, (HEADS, DIM))[None],
            b[None],
            use_qk_l2norm=True,
            use_gate=True,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            lower_bound=self.lower_bound,
            use_beta_sigmoid=True,
            state_v_first=True,
        )
        out = out[0]
        if self.layer_seam.kind == "kimi_packed":
            out = reference.gated_rms_norm(out, z.unflatten(-1, (HEADS, DIM)), layer.o_norm.weight, layer.o_norm.eps)
        return out[request.computed :], state[0], history

    def history(self, slot: int) -> Tensor:
        """The convolution cache of a slot, [L, 3*C]."""
        cache = self.conv_cache[slot]
        return (cache.T if self.dim_first else cache).float()

    @staticmethod
    def advance(part: Part) -> None:
        """What the engine does after sampling: keep the accepted tokens."""
        kept = part.count if part.accept is None else part.accept
        part.request.inputs = [
            torch.cat([old, new[:kept]]) for old, new in zip(part.request.inputs, part.fresh, strict=True)
        ]
        part.request.accepted = 1 if part.accept is None else part.accept
