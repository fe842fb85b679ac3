"""Latent attention of glm5_next over all cached tokens, while its indexer could leave none of them out.

An attention layer scores its cached tokens in pools and attends to the best `index_topk` of them. As long as there are
no more than that it attends to all, and scoring is for nothing: two thirds of the layer's launches, and three waits of
the host for the device. Only the rows that later scores will read are kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import AttentionCache, causal_mask


def sees_all(module: Any, tokens: int) -> bool:
    """Whether the layer attends to every one of so many cached tokens, and `attend_to_all` can be asked."""
    config = module.config
    whole = config.index_kpool == 1 or config.index_kpool_always_select_tail  # else an unfinished pool is left out
    return bool(whole and tokens <= config.index_topk and config._attn_implementation == "sdpa")


def attend_to_all(module: Any, x: Tensor, cache: AttentionCache) -> Tensor:
    """A request's new tokens x [1, n, D] through a `Glm5NextTextAttention`, which are cached too."""
    count, layer = x.shape[1], module.layer_idx
    mask = causal_mask(count, cache.length(layer), x.dtype, x.device, additive=False)
    q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))).view(1, count, -1, module.qk_head_dim).transpose(1, 2)
    latent, rotary = module.kv_a_proj_with_mqa(x).split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
    latent, rotary = cache.update(module.kv_a_layernorm(latent)[:, None], rotary[:, None], layer)
    keys, values = module.expand_kv(latent, rotary)
    if module.indexer is not None:
        cache.update_indexer(_indexer_rows(module.indexer, x), layer)
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=module.scaling)
    out: Tensor = module.o_proj(y.transpose(1, 2).reshape(1, count, -1))
    return out


def _indexer_rows(indexer: Any, x: Tensor) -> Tensor:
    """What the indexer keeps of a token: its key, the logits of its weight in its pool, and that it is no padding."""
    keys = indexer.k_norm(indexer.wk(x))
    return torch.cat([keys, F.linear(x, indexer.index_kpool_compress_gate), keys.new_ones(*x.shape[:2], 1)], dim=-1)
