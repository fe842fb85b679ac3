"""The prefill step of vLLM's KDA layers on rapidkda: one function a kind of layer.

Steps without a prefill never come here. In a step with one, convolution, KDA and the verification of speculative
requests read the step's tokens through segment tables and update vLLM's caches in place: no gather of tokens or
states, no dense copies, no scatter of outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...backends.base import Request
from ...dispatch import Choice, as_device, resolve, resolve_kda_prefill_backend, wish
from ...env import DECODE_BACKEND
from ...problem import Op, Sizes
from . import metadata as steps
from .seams import Kind, LayerSeam

NULL_SLOT = 0  # vLLM's padding slot


@dataclass(frozen=True)
class Plan:
    """What a layer decided when it was built.

    Attributes:
        prefill, conv, verify: backends; conv is None where vLLM's own convolution stays, verify without speculation.
        workspace_bytes: scratch of the largest prefill that the scheduler may send.
        lower_bound: of the bounded gate; None for the unbounded one.
    """

    kind: Kind
    prefill: Choice
    conv: Choice | None
    verify: Choice | None
    workspace_bytes: int
    lower_bound: float | None

    def __str__(self) -> str:
        parts = [f"prefill {self.prefill}"]
        if self.conv is not None:
            parts.append(f"convolution {self.conv.name}")
        if self.verify is not None:
            parts.append(f"verification in mixed steps {self.verify.name}")
        return f"{'; '.join(parts)}; workspace {self.workspace_bytes} bytes"

    def workspace(self) -> Tensor | None:
        """This step's scratch, from vLLM's shared workspace; None when the backend needs none."""
        if self.workspace_bytes == 0:
            return None
        from vllm.v1.worker.workspace import current_workspace_manager

        scratch: Tensor
        (scratch,) = current_workspace_manager().get_simultaneous(((self.workspace_bytes,), torch.uint8))
        return scratch


def plan(seam: LayerSeam, layer: Any, vllm_config: Any) -> Plan:
    """Choose backends and size the workspace for a layer that vLLM has just built.

    Raises `BackendUnavailable` when the backend asked for (RAPIDKDA_PREFILL_BACKEND) cannot run this layer, and
    RuntimeError for a configuration of the layer that the plugin does not serve.
    """
    if getattr(layer, "use_recoverssm", False):
        raise RuntimeError(f"{seam.cls}: rapidkda's prefill does not serve --use-replayssm; turn one of the two off")
    if seam.kind == "kimi_separate" and layer.num_spec:
        raise RuntimeError(f"{seam.cls}: this version's layer does not serve speculative decoding")
    convs = [getattr(layer, name) for name in ("conv1d", "q_conv1d", "k_conv1d", "v_conv1d") if hasattr(layer, name)]
    if any(conv.bias is not None for conv in convs):
        raise RuntimeError(f"{seam.cls}: rapidkda expects a convolution without bias, this layer has one")
    device = layer.dt_bias.device
    dtype = vllm_config.model_config.dtype
    lower_bound = layer.kda_lower_bound if seam.kind == "glm" else getattr(layer, "gate_lower_bound", None)
    state_dtype = layer.get_state_dtype()[1]
    prefill = resolve_kda_prefill_backend(
        device=device,
        dtype=dtype,
        head_dim=layer.head_dim,
        lower_bound=lower_bound,
        state_dtype=state_dtype,
        checkpoints=seam.checkpoints,
    )

    def neighbour(op: Op) -> Choice:
        request = Request(
            op=op,
            device=as_device(device),
            dtype=dtype,
            key_dim=layer.head_dim,
            value_dim=layer.head_dim,
            gate="softplus" if lower_bound is None else "bounded",
            state_dtype=state_dtype,
            rollback="slots",  # of verify: vLLM keeps a state for each position
        )
        name, source = wish(variable=DECODE_BACKEND)
        return resolve(request, name, source)

    sizes = Sizes(
        tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        segments=vllm_config.scheduler_config.max_num_seqs,
        heads=layer.local_num_heads,
        value_heads=layer.local_num_heads,
        key_dim=layer.head_dim,
        value_dim=layer.head_dim,
        dtype=dtype,
    )
    return Plan(
        kind=seam.kind,
        prefill=prefill,
        conv=None if seam.kind == "kimi_separate" else neighbour("conv"),
        verify=neighbour("verify") if layer.num_spec else None,
        workspace_bytes=ops.workspace_bytes("prefill", sizes, backend=prefill, device=device),
        lower_bound=lower_bound,
    )


def run(plan: Plan, layer: Any, metadata: Any, arguments: dict[str, Any]) -> None:
    """One prefill step of a layer; `arguments` are those of the layer's `_forward`."""
    _ADAPTERS[plan.kind](plan, layer, metadata, **arguments)


def kimi_separate(
    plan: Plan,
    layer: Any,
    metadata: Any,
    *,
    q_proj_states: Tensor,
    k_proj_states: Tensor,
    v_proj_states: Tensor,
    g1: Tensor,
    beta: Tensor,
    core_attn_out: Tensor,
) -> None:
    """q, k and v are projected and convolved one by one; beta comes as probabilities, the output norm follows outside.

    q, k, v [T, H*D]; g1 [1, T, H, D] logits; beta [1, T, H] float32; core_attn_out [1, T, H, D].
    The three slices of the convolution cache are not dense, so vLLM's own convolution runs.
    """
    module = sys.modules[type(layer).__module__]
    conv_state = layer.kv_cache[0]
    if not module.is_conv_state_dim_first():
        conv_state = conv_state.transpose(-1, -2)
    count = metadata.num_actual_tokens
    convolved = (
        module.causal_conv1d_fn(
            x[:count].transpose(0, 1),
            conv.weight.view(conv.weight.size(0), conv.weight.size(2)),
            conv.bias,
            activation="silu",
            conv_states=history,
            has_initial_state=metadata.has_initial_state,
            cache_indices=metadata.non_spec_state_indices_tensor,
            query_start_loc=metadata.non_spec_query_start_loc,
            metadata=metadata,
        ).transpose(0, 1)
        for x, conv, history in zip(
            (q_proj_states, k_proj_states, v_proj_states),
            (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d),
            conv_state.chunk(3, dim=-2),
            strict=True,
        )
    )
    q, k, v = (x.unflatten(-1, (-1, layer.head_dim)) for x in convolved)
    _kda(plan, layer, metadata, (q, k, v, g1[0, :count], beta[0, :count]), core_attn_out[0, :count], logits=False)


def kimi_packed(
    plan: Plan,
    layer: Any,
    metadata: Any,
    *,
    mixed_qkv: Tensor,
    g1: Tensor,
    g2: Tensor,
    beta: Tensor,
    core_attn_out: Tensor,
) -> None:
    """One projection q | k | v [T, 3*H*D] and one convolution weight; the output norm (gate g2) is part of the step."""
    weight = layer.conv1d.weight
    _packed(plan, layer, metadata, mixed_qkv, weight.view(weight.size(0), weight.size(2)), g1, beta, core_attn_out)
    core_attn_out.copy_(layer.o_norm(core_attn_out, g2))


def glm(
    plan: Plan,
    layer: Any,
    metadata: Any,
    *,
    qkv_proj_states: Tensor,
    g1: Tensor,
    beta: Tensor,
    core_attn_out: Tensor,
) -> None:
    """One projection q | k | v [T, 3*H*D], three convolution weights merged once; the norm follows outside."""
    if layer._merged_conv_weight is None:
        convs = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
        layer._merged_conv_weight = torch.cat([c.weight.view(c.weight.size(0), c.weight.size(2)) for c in convs])
    _packed(plan, layer, metadata, qkv_proj_states, layer._merged_conv_weight, g1, beta, core_attn_out)


def _packed(
    plan: Plan, layer: Any, metadata: Any, x: Tensor, weight: Tensor, g1: Tensor, beta: Tensor, core_attn_out: Tensor
) -> None:
    """Convolution over the step's q | k | v columns in one launch a group, then KDA on its column slices."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    count = metadata.num_actual_tokens
    table = steps.tables(metadata)
    x = x[:count]
    history = layer.kv_cache[0]
    common: dict[str, Any] = {"state": history, "channels_last": not is_conv_state_dim_first(), "pad_slot": NULL_SLOT}
    convolved = ops.causal_conv(
        x,
        weight,
        segments=table.prefill,
        slots=metadata.non_spec_state_indices_tensor[: table.prefill.count],
        has_initial_state=metadata.has_initial_state[: table.prefill.count],
        out=torch.empty_like(x, memory_format=torch.contiguous_format),
        checkpoints=table.checkpoints,
        checkpoint_pool=None if table.checkpoints is None else history,
        backend=plan.conv,
        **common,
    )
    if table.verify is not None:
        ops.causal_conv(
            x,
            weight,
            segments=table.verify,
            slots=metadata.spec_state_indices_tensor[: table.verify.count, 0],
            accepted=metadata.num_accepted_tokens[: table.verify.count],
            keep_all=True,
            out=convolved,
            backend=plan.conv,
            **common,
        )
    q, k, v = (part.unflatten(-1, (-1, layer.head_dim)) for part in convolved.chunk(3, dim=-1))
    _kda(plan, layer, metadata, (q, k, v, g1[0, :count], beta[0, :count]), core_attn_out[0, :count], logits=True)


def _kda(plan: Plan, layer: Any, metadata: Any, inputs: tuple[Tensor, ...], out: Tensor, *, logits: bool) -> None:
    """KDA of all requests of a step, each into its own rows of `out` [T, H, D]. inputs: q, k, v, g, beta."""
    table = steps.tables(metadata)
    state = layer.kv_cache[1]
    common: dict[str, Any] = {
        "state": state,
        "out": out,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "lower_bound": plan.lower_bound,
        "use_beta_sigmoid_in_kernel": logits,
        "pad_slot": NULL_SLOT,
    }
    ops.prefill(
        *inputs,
        segments=table.prefill,
        slots=metadata.non_spec_state_indices_tensor[: table.prefill.count],
        has_initial_state=metadata.has_initial_state[: table.prefill.count],
        checkpoints=table.checkpoints,
        checkpoint_pool=None if table.checkpoints is None else state,
        workspace=plan.workspace(),
        backend=plan.prefill,
        **common,
    )
    if table.verify is not None:
        ops.verify(
            *inputs,
            segments=table.verify,
            slots=metadata.spec_state_indices_tensor[: table.verify.count],
            accepted=metadata.num_accepted_tokens[: table.verify.count],
            backend=plan.verify,
            **common,
        )


_ADAPTERS: dict[Kind, Callable[..., None]] = {"kimi_separate": kimi_separate, "kimi_packed": kimi_packed, "glm": glm}
