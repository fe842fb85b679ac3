"""Small seeded models of the KDA families, for the demo, the tests and the benchmarks. Needs transformers.

They are the real classes of transformers with small dimensions, so that parameter names, caches and `generate` are
those of the released models: three KDA layers of head dim 128 for each attention layer, a dense feed-forward first and
mixtures of experts after it. Token ids are bytes by default; id 0 is padding and there is no end token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PATTERN = 4  # every fourth layer is an attention layer, the others are KDA
CONV_STD = 0.5  # taps of the short convolution: of order one, so that values are not tiny beside the norms' epsilon


def build_glm5_next(
    seed: int = 0,
    *,
    layers: int = 4,
    hidden_size: int = 128,
    heads: int = 2,
    head_dim: int = 128,
    attention_heads: int = 2,
    experts: int = 4,
    vocab_size: int = 256,
    lower_bound: float | None = -5.0,
    index_topk: int = 2048,
    index_kpool: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A small GLM-5.3-Flash type model (`Glm5NextForConditionalGeneration`), in evaluation mode, on the CPU.

    Text needs nothing special: call it with `input_ids` only. The vision tower is there because the class requires
    one, and is as small as it can be.

    Args:
        seed: of the weights; the global random state is left alone.
        layers: decoder layers; the fourth, eighth, ... are sparse attention.
        heads, head_dim: of the KDA layers.
        attention_heads: of the sparse attention layers (head dim 32, indexer of 2 heads x 16).
        lower_bound: of the forget gate, or None for the unbounded gate.
        index_topk: cached tokens that a query attends to, a multiple of index_kpool. A context of at most that many
            tokens is attended to in full; beyond it the choice is discrete, so that two correct implementations that
            round differently may choose differently.
        dtype: of the weights. As in released checkpoints, conv1d, dt_bias and A_log stay float32.
    """
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration
    from transformers.models.glm5_next import Glm5NextTextConfig, Glm5NextVisionConfig

    text = Glm5NextTextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        moe_intermediate_size=hidden_size,
        num_hidden_layers=layers,
        layer_types=_layer_types(layers, "deepseek_sparse_attention"),
        mlp_layer_types=_mlp_layer_types(layers),
        num_attention_heads=attention_heads,
        num_key_value_heads=attention_heads,
        n_routed_experts=experts,
        num_experts_per_tok=min(2, experts),
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        index_topk=index_topk,
        index_kpool=index_kpool,
        index_head_dim=16,
        index_n_heads=2,
        linear_num_heads=heads,
        linear_head_dim=head_dim,
        linear_lower_bound=lower_bound,
        hc_mult=2,
        initializer_range=hidden_size**-0.5,
        pad_token_id=0,
    )
    vision = Glm5NextVisionConfig(
        depth=1,
        hidden_size=16,
        num_heads=2,
        intermediate_size=16,
        out_hidden_size=hidden_size,
        projection_intermediate_size=16,
    )
    config = Glm5NextConfig(text_config=text, vision_config=vision)
    return _build(Glm5NextForConditionalGeneration, config, seed, dtype)


def build_kimi_linear(
    seed: int = 0,
    *,
    layers: int = 4,
    hidden_size: int = 128,
    heads: int = 2,
    head_dim: int = 128,
    attention_heads: int = 2,
    experts: int = 4,
    vocab_size: int = 256,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A small Kimi-Linear type model (`KimiLinearForCausalLM`), in evaluation mode, on the CPU.

    Its forget gate is the unbounded one. Arguments as in `build_glm5_next`; the attention layers are latent attention
    over the whole context (head dim 32 + 16).
    """
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        moe_intermediate_size=hidden_size,
        num_hidden_layers=layers,
        layer_types=_layer_types(layers, "full_attention"),
        mlp_layer_types=_mlp_layer_types(layers),
        num_attention_heads=attention_heads,
        num_key_value_heads=attention_heads,
        num_local_experts=experts,
        num_experts_per_tok=min(2, experts),
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_num_heads=heads,
        linear_head_dim=head_dim,
        initializer_range=hidden_size**-0.5,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _build(KimiLinearForCausalLM, config, seed, dtype)


def _layer_types(layers: int, attention: str) -> list[str]:
    return [attention if i % PATTERN == PATTERN - 1 else "linear_attention" for i in range(layers)]


def _mlp_layer_types(layers: int) -> list[str]:
    return ["dense" if i == 0 else "sparse" for i in range(layers)]


def _build(model_class: type[Any], config: Any, seed: int, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for module in model.modules():
            if isinstance(module, nn.Conv1d):
                nn.init.normal_(module.weight, std=CONV_STD)
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)
    return model.eval()
