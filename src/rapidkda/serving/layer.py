"""The KDA layer of GLM-5.3-Flash, Kimi-Linear and Kimi-K3 for serving: one call runs any mixed step.

hidden -> q | k | v | f_a | g_a | b in one product -> causal convolution and SiLU on q | k | v -> KDA -> per-head
RMSNorm times sigmoid(g_b(g_a)) -> o_proj. Kernels read the step's segment tables and column slices of the projection,
and update the pools in place; nothing is gathered, copied or merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import __version__, checks, env
from ..backends.base import Request
from ..device import Device
from ..dispatch import Choice
from ..problem import Rollback
from . import weights
from .backends import BackendWish, LayerOp, choose
from .batch import StepBatch
from .config import StateShape
from .core import CoreInputs, GatedNorm, run_core
from .pool import LayerState, StatePool
from .weights import WeightShape
from .workspace import Workspace

ROW_ALIGNMENT = 64  # elements; rows of the fused projection start on it, so that every slice of it can be loaded wide


class KDALayer(nn.Module):
    """One KDA layer on one tensor-parallel rank.

    Args:
        hidden_size: width of the residual stream.
        num_heads: heads of the whole model; this rank holds num_heads / tp_size of them.
        head_dim: K = V.
        conv_width: taps of the convolution.
        lower_bound: of the bounded gate, in [-5, 0); None for the unbounded softplus gate.
        eps: of the gated RMSNorm.
        allow_neg_eigval: double the write strength.
        pool_layer: which layer of the state pool is this one's.
        tp_rank, tp_size: tensor parallelism. The output is this rank's summand: the engine all-reduces it.
        dtype: of activations and projections; the convolution, gate and norm parameters are float32.
        state_dtype: of the pool that the layer is going to be given.
        checkpoints: steps will ask for prefix-cache checkpoints; a prefill backend that cannot export them is passed
            over, or refused when asked for by name.
        backends: what the configuration says about backends.
        device: where the layer runs.

    Raises ValueError, `ConfigConflict` or `BackendUnavailable` for a wish that cannot be served here.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int = 128,
        *,
        conv_width: int = 4,
        lower_bound: float | None = -5.0,
        eps: float = 1e-5,
        allow_neg_eigval: bool = False,
        pool_layer: int = 0,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        checkpoints: bool = True,
        backends: BackendWish | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        for name, value in (("hidden_size", hidden_size), ("num_heads", num_heads), ("head_dim", head_dim)):
            checks.integer(name, value, 1)
        checks.integer("tp_size", tp_size, 1)
        if num_heads % tp_size:
            raise ValueError(f"tp_size must divide the {num_heads} heads, got {tp_size}")
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"tp_rank must be in 0..{tp_size - 1}, got {tp_rank}")
        if lower_bound is not None and not -5.0 <= checks.finite("lower_bound", lower_bound) < 0.0:
            raise ValueError(f"lower_bound must be in [-5, 0) or None, got {lower_bound}")
        self.hidden_size = hidden_size
        self.num_heads = num_heads // tp_size
        self.head_dim = head_dim
        self.lower_bound = lower_bound
        self.eps = eps
        self.allow_neg_eigval = allow_neg_eigval
        self.pool_layer = checks.integer("pool_layer", pool_layer, 0)
        self.checkpoints = checkpoints
        self.shape = StateShape(
            heads=self.num_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            conv_width=conv_width,
            state_dtype=state_dtype,
            conv_dtype=dtype,
        )
        self.weight_shape = WeightShape(hidden_size, num_heads, head_dim, conv_width, tp_rank, tp_size)
        self.choices: dict[LayerOp, Choice] = choose(
            backends or BackendWish(),
            Request(
                op="prefill",
                device=Device.of(torch.device(device)),
                dtype=dtype,
                key_dim=head_dim,
                value_dim=head_dim,
                gate="softplus" if lower_bound is None else "bounded",
                state_dtype=state_dtype,
                checkpoints=checkpoints,
            ),
        )
        width = self.num_heads * head_dim
        self._splits = [3 * width, head_dim, head_dim, self.num_heads]  # q | k | v, f_a, g_a, b, and spare rows
        rows = -(-sum(self._splits) // ROW_ALIGNMENT) * ROW_ALIGNMENT
        self._splits.append(rows - sum(self._splits))

        def parameter(*extents: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(extents, dtype=dtype, device=device), requires_grad=False)

        self.in_proj = parameter(rows, hidden_size)
        self.f_b_proj = parameter(width, head_dim)
        self.g_b_proj = parameter(width, head_dim)
        self.conv_weight = parameter(3 * width, conv_width, dtype=torch.float32)
        self.A_log = parameter(self.num_heads, dtype=torch.float32)
        self.dt_bias = parameter(width, dtype=torch.float32)
        self.o_norm = parameter(head_dim, dtype=torch.float32)
        self.o_proj = parameter(hidden_size, width)

    @staticmethod
    def from_config(config: Any, **options: Any) -> KDALayer:
        """Build from a Hugging Face Glm5NextTextConfig or KimiLinearConfig; `options` are those of the constructor."""
        return KDALayer(**_dimensions(config), **options)

    def state_shape(self, max_drafts: int = 0, rollback: Rollback = "replay", **options: Any) -> StateShape:
        """The shape of the pool that this layer needs. `options` are further fields of `StateShape`."""
        fields = {name: getattr(self.shape, name) for name in StateShape.__dataclass_fields__}
        return StateShape(**{**fields, "max_drafts": max_drafts, "rollback": rollback, **options})

    def backend_report(self) -> dict[str, Any]:
        """What serves this layer and why, as plain values for an engine's log or a result file."""
        return {
            "version": __version__,
            "checkpoints": self.checkpoints,
            "backends": {
                op: {
                    "name": choice.name,
                    "reason": choice.reason,
                    "source": choice.source,
                    "passed_over": {name: list(unmet) for name, unmet in choice.passed_over.items()},
                }
                for op, choice in self.choices.items()
            },
        }

    @torch.no_grad()
    def load_weights(self, source: Mapping[str, Tensor] | str | Path, prefix: str = "") -> None:
        """Load Hugging Face weights of a glm5_next or kimi_linear layer.

        Args:
            source: a mapping, a safetensors file, or a folder of them. Tensors may be whole, or this rank's part.
            prefix: of the layer's names, such as "model.layers.3.self_attn.".

        Raises ValueError that names the tensor: unknown below the prefix, missing, or of another shape.
        """
        width = self.num_heads * self.head_dim
        q, k, v, f_a, g_a, b, _ = self.in_proj.split([width, width, width, *self._splits[1:]])
        q_conv, k_conv, v_conv = self.conv_weight.split(width)
        targets = {
            "q": q,
            "k": k,
            "v": v,
            "f_a": f_a,
            "g_a": g_a,
            "b": b,
            "f_b": self.f_b_proj,
            "g_b": self.g_b_proj,
            "q_conv": q_conv,
            "k_conv": k_conv,
            "v_conv": v_conv,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "o_norm": self.o_norm,
            "o_proj": self.o_proj,
        }
        found = dict(weights.read(source, prefix, self.weight_shape, optional=self.lower_bound is not None))
        for own in weights.OPTIONAL:
            targets[own].zero_()
        for own, value in found.items():
            targets[own].copy_(value)

    @torch.no_grad()
    def forward(self, hidden: Tensor, batch: StepBatch, pool: StatePool, workspace: Workspace, lane: int = 0) -> Tensor:
        """Run the layer on one step.

        Args:
            hidden: [T, hidden_size], T = batch.num_tokens, dtype of the layer.
            batch: the step's tables, filled over `pool`.
            pool: states, updated in place.
            workspace: scratch, planned for steps of this size; overwritten.
            lane: which of its lanes.

        Returns:
            [T, hidden_size], newly allocated; this rank's summand of it. Rows of padding are exactly zero.

        Raises ValueError or TypeError that names the argument; then nothing was written.
        """
        state = self._check(hidden, batch, pool, workspace, lane)
        count, heads, dim = batch.num_tokens, self.num_heads, self.head_dim
        projected = F.linear(hidden, self.in_proj)
        x, f_a, g_a, beta, _ = projected.split_with_sizes(self._splits, 1)
        g = F.linear(f_a, self.f_b_proj).view(count, heads, dim)
        z = F.linear(g_a, self.g_b_proj).view(count, heads, dim)
        out = workspace.core_output(count, lane)
        inputs = CoreInputs(
            x=x,
            g=g,
            beta=beta,
            conv_weight=self.conv_weight,
            gate=self._gate,
            conv_out=workspace.conv_output(count, lane),
            out=out,
            scratch=workspace.scratch(lane),
            norm=GatedNorm(z, self.o_norm, self.eps),
        )
        run_core(inputs, batch, pool, state, self.choices)
        result = F.linear(out.view(count, heads * dim), self.o_proj)
        batch.zero_padding(result)
        if env.check_device_values():
            self._check_finite(batch, state, pool.shape)
        return result

    def _check(self, hidden: Tensor, batch: StepBatch, pool: StatePool, workspace: Workspace, lane: int) -> LayerState:
        checks.tensor("hidden", hidden)
        checks.shape("hidden", hidden, (batch.num_tokens, self.hidden_size), "[T, hidden_size]")
        checks.dtype("hidden", hidden, (self.in_proj.dtype,))
        if hidden.device != self.in_proj.device:
            raise ValueError(f"hidden must be on {self.in_proj.device} like the weights, got {hidden.device}")
        if batch.pool is not pool:
            raise ValueError("batch must be filled over the pool that is given, got a batch over another pool")
        for name in ("heads", "value_heads", "key_dim", "value_dim", "conv_width", "state_dtype"):
            wanted, got = getattr(self.shape, name), getattr(pool.shape, name)
            if wanted != got:
                kind = TypeError if name == "state_dtype" else ValueError
                raise kind(f"pool must have {name} {wanted} like the layer, got {got}")
        if self.pool_layer >= len(pool.layers):
            raise ValueError(f"pool must have more than {self.pool_layer} layers (pool_layer), got {len(pool.layers)}")
        if replace(workspace.shape, record_rows=None) != replace(pool.shape, record_rows=None):  # it has no records
            raise ValueError(f"workspace must be planned for {pool.shape}, got {workspace.shape}")
        if workspace.dtype != self.in_proj.dtype:
            raise TypeError(f"workspace must be planned for {self.in_proj.dtype}, got {workspace.dtype}")
        if workspace.prefill.name != self.choices["prefill"].name:
            raise ValueError(
                f"workspace must be planned for backend {self.choices['prefill'].name}, got {workspace.prefill.name}"
            )
        prefill = batch.prefill
        workspace.check(batch.num_tokens, 0 if prefill is None else prefill.segments.count, lane)
        if prefill is not None and prefill.checkpoints is not None and not (self.checkpoints or batch.fixed):
            raise ValueError("batch must hold no checkpoints for a layer built with checkpoints=False, got some")
        return pool.layers[self.pool_layer]

    @property
    def _gate(self) -> dict[str, Any]:
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.lower_bound,
            "allow_neg_eigval": self.allow_neg_eigval,
        }

    def _check_finite(self, batch: StepBatch, state: LayerState, shape: StateShape) -> None:
        """Debug mode: report the first state that this step left non-finite, or with a deferred one what it is yet to
        take in."""
        if batch.plan is None:
            return
        verified = {row.slots[0] for row in batch.plan.rows["verify"]}  # elsewhere `held` says nothing
        for slot, request_id in batch.plan.written(shape).items():
            finite = torch.isfinite(state.recurrent[slot]).all()
            if slot in verified and state.held is not None and state.records is not None:
                row = torch.arange(state.records.shape[1], device=state.held.device)[:, None]
                finite &= torch.isfinite(state.records[slot][row < state.held[slot]]).all()
            if not finite:
                raise FloatingPointError(
                    f"request {request_id!r} left a non-finite state in slot {slot} of KDA layer {self.pool_layer}"
                )


class Glm5NextLinearAttention(KDALayer):
    """The "linear_attention" layer of GLM-5.3-Flash, built from a Hugging Face Glm5NextTextConfig."""

    def __init__(self, config: Any, layer_idx: int = 0, **options: Any):
        """`layer_idx` is the model's layer index; its place among the KDA layers is the layer of the pool."""
        before = list(getattr(config, "layer_types", None) or ["linear_attention"] * layer_idx)[:layer_idx]
        super().__init__(**_dimensions(config), pool_layer=before.count("linear_attention"), **options)


def _dimensions(config: Any) -> dict[str, Any]:
    """The constructor's arguments that a Hugging Face config decides."""
    activation = getattr(config, "hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.hidden_act must be 'silu', the convolution's activation, got {activation!r}")
    return {
        "hidden_size": config.hidden_size,
        "num_heads": config.linear_num_heads,
        "head_dim": config.linear_head_dim,
        "conv_width": config.linear_conv_kernel_dim,
        "lower_bound": getattr(config, "linear_lower_bound", None),
        "eps": config.rms_norm_eps,
    }
