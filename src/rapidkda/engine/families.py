"""The model families that the engine runs, as the parts it needs of them.

All parts but attention work token by token, so they run on the packed tokens of many requests, as [1, T, ...]. The
engine calls the model's own modules for them; nothing of the model is patched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .cache import AttentionCache, causal_mask
from .latent import attend_to_all, sees_all

KDA = "linear_attention"
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")

# (attention module, hidden [1, n, D], cache, top-k of the layer before) to ([1, n, D], top-k for the layer after)
Attend = Callable[[Any, Tensor, AttentionCache, Any], tuple[Tensor, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """How one family is put together.

    Attributes:
        name: model type in the configuration.
        config: of the text model.
        text: the text model: embed_tokens, layers, norm.
        head: hidden states to logits.
        embed: token ids [1, T] to the residual.
        enter: (decoder layer, residual) to the input of its attention [1, T, D] and what `leave` needs.
        leave: (decoder layer, carry, attention output [1, T, D]) to the residual after the whole layer.
        finish: the residual to the hidden states [1, T, D] that `head` takes.
        attend: one request's tokens through an attention module.
    """

    name: str
    config: Any
    text: Any
    head: nn.Module
    embed: Callable[[Tensor], Tensor]
    enter: Callable[[Any, Tensor], tuple[Tensor, Any]]
    leave: Callable[[Any, Any, Tensor], Tensor]
    finish: Callable[[Tensor], Tensor]
    attend: Attend


def family_of(model: Any) -> Family:
    """The family of a transformers model.

    Raises:
        TypeError: model is no torch module.
        ValueError: model is of another family, or configured in a way that the engine does not run.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    name = str(getattr(getattr(model, "config", None), "model_type", None))
    if name not in FAMILIES or not hasattr(model, "lm_head"):
        raise ValueError(
            f"model must be a causal language model of transformers of type {', '.join(FAMILIES)}, "
            f"got {type(model).__name__} (model_type {name})"
        )
    family = FAMILIES[name](model)
    attention = family.config._attn_implementation
    if attention not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"model must be loaded with attn_implementation {' or '.join(ATTENTION_IMPLEMENTATIONS)}, got {attention!r}"
        )
    return family


def _glm5_next(model: Any) -> Family:
    text = model.model.language_model
    config = text.config
    _check_shared_indexers(config)
    keyword = _cache_keyword(text)

    def embed(ids: Tensor) -> Tensor:
        embedded: Tensor = text.embed_tokens(ids)
        return embedded.unsqueeze(2).expand(-1, -1, config.hc_mult, -1).contiguous()  # residual streams [1, T, M, D]

    def enter(layer: Any, streams: Tensor) -> tuple[Tensor, Any]:
        post, mix, x = layer.attn_hc(streams)
        return layer.input_layernorm(x), (post, mix, streams)

    def leave(layer: Any, carry: Any, y: Tensor) -> Tensor:
        post, mix, streams = carry
        streams = _expand(post, mix, streams, y)
        post, mix, x = layer.ffn_hc(streams)
        return _expand(post, mix, streams, layer.mlp(layer.post_attention_layernorm(x)))

    def attend(module: Any, x: Tensor, cache: AttentionCache, topk: Any) -> tuple[Tensor, Any]:
        if sees_all(module, cache.length(module.layer_idx) + x.shape[1]):
            return attend_to_all(module, x, cache), None  # a layer that shares the choice sees all of them too
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)  # no padding; the indexer masks causally
        y, _, topk = module(x, attention_mask=real, prev_topk_indices=topk, **{keyword: cache})
        return y, topk

    return Family(
        name="glm5_next",
        config=config,
        text=text,
        head=model.lm_head,
        embed=embed,
        enter=enter,
        leave=leave,
        finish=lambda streams: text.norm(text.hc_head(streams)),
        attend=attend,
    )


def _cache_keyword(text: Any) -> str:
    """What this release of transformers calls the cache: `cache`, or `past_key_values` in older ones."""
    return "cache" if "cache" in inspect.signature(text.forward).parameters else "past_key_values"


def _expand(post: Tensor, mix: Tensor, streams: Tensor, y: Tensor) -> Tensor:
    """Mix the residual streams [1, T, M, D] and add a sublayer's output [1, T, D] to each by its weight."""
    mixed = torch.matmul(mix.to(streams.dtype).transpose(-1, -2), streams)
    return post.to(streams.dtype).unsqueeze(-1) * y.unsqueeze(-2) + mixed


def _check_shared_indexers(config: Any) -> None:
    """A layer that shares its indexer's choice takes it from the layer just before it, in the untouched model too."""
    types = list(config.indexer_types)
    for index, (layer, indexer) in enumerate(zip(config.layer_types, types)):
        if layer == KDA or indexer != "shared":
            continue
        if index == 0 or config.layer_types[index - 1] == KDA or types[index - 1] != "full":
            raise ValueError(
                f"indexer_types[{index}] must be 'full': a shared choice comes from an attention layer with an "
                f"indexer of its own just before it"
            )


def _kimi_linear(model: Any) -> Family:
    text = model.model
    config = text.config
    keyword = _cache_keyword(text)

    def enter(layer: Any, residual: Tensor) -> tuple[Tensor, Any]:
        return layer.input_layernorm(residual), residual

    def leave(layer: Any, residual: Any, y: Tensor) -> Tensor:
        residual = residual + y
        out: Tensor = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return out

    def attend(module: Any, x: Tensor, cache: AttentionCache, topk: Any) -> tuple[Tensor, Any]:
        additive = config._attn_implementation == "eager"
        mask = causal_mask(x.shape[1], cache.length(module.layer_idx), x.dtype, x.device, additive=additive)
        y, _ = module(x, attention_mask=mask, **{keyword: cache})
        return y, None

    return Family(
        name="kimi_linear",
        config=config,
        text=text,
        head=model.lm_head,
        embed=text.embed_tokens,
        enter=enter,
        leave=leave,
        finish=text.norm,
        attend=attend,
    )


FAMILIES: Mapping[str, Callable[[Any], Family]] = {"glm5_next": _glm5_next, "kimi_linear": _kimi_linear}
