"""A model's KDA modules as layers of the serving package, on the same weights.

`KDALayer` keeps q, k, v, f_a, g_a and b in one matrix, the transformers module in six. The layer's matrix becomes the
only copy: the module's parameters turn into views of it. Their values do not change, so the model goes on working as it
is, with `generate` and `save_pretrained` too. Moving the model to another device or dtype afterwards parts the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..serving import BackendWish, KDALayer


@torch.no_grad()
def adopt(module: Any, config: Any, pool_layer: int, *, state_dtype: torch.dtype, backends: BackendWish) -> KDALayer:
    """The serving layer of one KDA module, sharing its weights.

    Parameters that the module keeps in another dtype than the layer's float32 (convolution, gate and norm of a
    bfloat16 Kimi-Linear model) stay apart: they are the small ones.

    Raises:
        ValueError: the module's weights are not those of a KDA layer, or are not plain float matrices.
    """
    weight = module.q_proj.weight
    if not weight.is_floating_point() or type(module.q_proj) is not nn.Linear:
        raise ValueError(
            f"model must have plain linear layers in its KDA layers, got {type(module.q_proj).__name__} "
            f"with weights of {weight.dtype}"
        )
    layer = KDALayer.from_config(
        config,
        pool_layer=pool_layer,
        dtype=weight.dtype,
        state_dtype=state_dtype,
        checkpoints=False,
        backends=backends,
        device=weight.device,
    )
    layer.load_weights({name: value.data for name, value in module.named_parameters()})
    for parameter, shared in _pairs(module, layer):
        if parameter.dtype == shared.dtype:
            parameter.data = shared.view(parameter.shape)
    return layer


def _pairs(module: Any, layer: KDALayer) -> list[tuple[nn.Parameter, Tensor]]:
    """The module's parameters, each with the part of the layer that holds the same values."""
    width, dim, heads = layer.num_heads * layer.head_dim, layer.head_dim, layer.num_heads
    gate = module.forget_gate
    rows = layer.in_proj.data
    fused = [module.q_proj, module.k_proj, module.v_proj, gate.f_a_proj, module.g_a_proj, module.b_proj]
    sizes = [width, width, width, dim, dim, heads]
    parts = rows[: sum(sizes)].split(sizes)
    return [
        *[(linear.weight, part) for linear, part in zip(fused, parts)],
        (gate.f_b_proj.weight, layer.f_b_proj.data),
        (module.g_b_proj.weight, layer.g_b_proj.data),
        (module.o_proj.weight, layer.o_proj.data),
        (module.conv1d.weight, layer.conv_weight.data),
        (gate.dt_bias, layer.dt_bias.data),
        (gate.A_log, layer.A_log.data),
        (module.o_norm.weight, layer.o_norm.data),
    ]
