"""The model's forward pass for training: transformers' own parameters and mathematics, arranged for speed.

It differs from the model's `forward` in three ways. Attention is causal attention by a fused kernel, which is what
sparse attention comes to while the context fits into `index_topk`. Kimi Delta Attention is a function that is passed
in, so that its gradients can come from any implementation. All else works on [N, ...] tokens of all rows at once in
four functions that torch.compile makes into few kernels; they see no sequence length, so that one compilation serves
rows of every length.

Matrix products are in `dtype`; residual streams, norms, gates and the softmax of the loss are in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import MtpHead

# (q, k, v [B, T, H, 128], g [B, T, H, 128] float32, the logarithm of what is kept, beta [B, T, H]) to [B, T, H, 128]
Kda = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Weights = Mapping[str, Tensor]


class TrainingForward:
    """Losses of a model and its MTP head on rows of tokens.

    Args:
        model: of `model.build`.
        head: the MTP head.
        kda: Kimi Delta Attention with gradients; it normalises q and k itself and scales by 128 ** -0.5.
        dtype: of matrix products.
        compiled: through torch.compile.
    """

    def __init__(self, model: Any, head: MtpHead, kda: Kda, *, dtype: torch.dtype, compiled: bool):
        text = model.model.language_model
        self.config = text.config
        self._kda = kda
        self._layers = [dict(layer.named_parameters()) for layer in text.layers]
        self._head = dict(head.named_parameters())
        self._embedding = text.embed_tokens.weight
        self._output = model.lm_head.weight
        self._norm = text.norm.weight
        steps = _Steps(self.config, dtype)
        wrap = torch.compile if compiled else lambda step: step
        self._kda_inputs = wrap(steps.kda_inputs)
        self._attention_inputs = wrap(steps.attention_inputs)
        self._leave = wrap(steps.leave)
        self._finish = wrap(steps.finish)
        self._head_inputs = wrap(steps.head_inputs)
        self._head_leave = wrap(steps.head_leave)
        self._losses = wrap(steps.losses)

    def hidden(self, tokens: Tensor) -> Tensor:
        """[B, T] tokens to the hidden states [B * T, D] that the output head takes."""
        rows, length = tokens.shape
        places = _places(rows, length, tokens.device)
        x = F.embedding(tokens.reshape(-1), self._embedding).float()
        streams = x[:, None].expand(-1, self.config.hc_mult, -1).contiguous()
        for weights, kind in zip(self._layers, self.config.layer_types):
            if kind == "linear_attention":
                *inputs, gate, post, mix = self._kda_inputs(streams, places, weights)
                y = self._run_kda(inputs, rows, length)
            else:
                *heads, gate, post, mix = self._attention_inputs(streams, weights)
                q, k, v = (x.view(rows, length, *x.shape[1:]).transpose(1, 2) for x in heads)
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                y = y.transpose(1, 2).reshape(rows * length, -1)
            streams = self._leave(streams, y, gate, post, mix, weights)
        out: Tensor = self._finish(streams, self._norm)
        return out

    def ahead(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The MTP head's output [B * T, D] from hidden states and the tokens [B, T] that follow them."""
        rows, length = tokens.shape
        places = _places(rows, length, tokens.device)
        embedded = F.embedding(tokens.reshape(-1), self._embedding).float()
        *inputs, gate, x = self._head_inputs(embedded, hidden, places, self._head)
        out: Tensor = self._head_leave(x, self._run_kda(inputs, rows, length), gate, self._head)
        return out

    def losses(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropies [N] of the targets [N], and whether the most likely token is right [N]."""
        loss, right = self._losses(hidden, targets, self._output)
        return loss, right

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, vocabulary] in float32."""
        return _linear(hidden, self._output, hidden.dtype).float()

    def _run_kda(self, inputs: list[Tensor], rows: int, length: int) -> Tensor:
        y = self._kda(*(x.view(rows, length, *x.shape[1:]) for x in inputs))
        return y.reshape(rows * length, -1)


class _Steps:
    """What torch.compile sees: functions of tensors on [N, ...] tokens."""

    def __init__(self, config: Any, dtype: torch.dtype):
        self.dtype = dtype
        self.eps: float = config.rms_norm_eps  # plain values: torch.compile cannot see through a configuration object
        self.hc_mult: int = config.hc_mult
        self.hc_eps: float = config.hc_eps
        self.hc_sinkhorn_iters: int = config.hc_sinkhorn_iters
        self.num_attention_heads: int = config.num_attention_heads
        self.attention_dims: list[int] = [config.qk_nope_head_dim, config.v_head_dim]
        self.swiglu_limit: float = config.swiglu_limit
        self.kda_heads: tuple[int, int] = (config.linear_num_heads, config.linear_head_dim)
        self.lower_bound: float = config.linear_lower_bound

    def kda_inputs(self, streams: Tensor, places: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        """q, k, v, g, beta, output gate; then what `leave` needs of the residual streams."""
        x, post, mix = self._collapse(streams, weights, "attn_hc.")
        x = self._norm(x, weights["input_layernorm.weight"])
        return *self._project_kda(x, places, weights), post, mix

    def attention_inputs(self, streams: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        """q, k, v [N, heads, dims]; an empty gate, and what `leave` needs of the residual streams."""
        x, post, mix = self._collapse(streams, weights, "attn_hc.")
        x = self._norm(x, weights["input_layernorm.weight"])
        q = self._norm(self._linear(x, weights, "self_attn.q_a_proj"), weights["self_attn.q_a_layernorm.weight"])
        q = self._linear(q, weights, "self_attn.q_b_proj").view(len(x), self.num_attention_heads, -1)
        kv = self._linear(x, weights, "self_attn.kv_a_proj_with_mqa")
        kv = self._norm(kv, weights["self_attn.kv_a_layernorm.weight"])
        kv = self._linear(kv, weights, "self_attn.kv_b_proj").view(len(x), self.num_attention_heads, -1)
        k, v = kv.split(self.attention_dims, dim=-1)
        return q, k.contiguous(), v.contiguous(), x.new_empty(0), post, mix

    def leave(self, streams: Tensor, y: Tensor, gate: Tensor, post: Tensor, mix: Tensor, weights: Weights) -> Tensor:
        """The residual streams after a layer, from what its KDA or attention gave."""
        if gate.numel():
            y = self._gated_norm(y, gate, weights["self_attn.o_norm.weight"])
        streams = self._expand(streams, self._linear(y, weights, "self_attn.o_proj"), post, mix)
        x, post, mix = self._collapse(streams, weights, "ffn_hc.")
        x = self._norm(x, weights["post_attention_layernorm.weight"])
        limit = self.swiglu_limit
        gate = self._linear(x, weights, "mlp.gate_proj").clamp(max=limit)
        up = self._linear(x, weights, "mlp.up_proj").clamp(-limit, limit)
        return self._expand(streams, self._linear(F.silu(gate) * up, weights, "mlp.down_proj"), post, mix)

    def finish(self, streams: Tensor, weight: Tensor) -> Tensor:
        return self._norm(streams.mean(dim=1), weight)

    def head_inputs(self, embedded: Tensor, hidden: Tensor, places: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        """q, k, v, g, beta, output gate and the residual of the MTP head."""
        joined = [self._norm(embedded, weights["enorm.weight"]), self._norm(hidden, weights["hnorm.weight"])]
        x = self._linear(torch.cat(joined, dim=-1), weights, "eh_proj").float()
        y = self._norm(x, weights["input_layernorm.weight"])
        return *self._project_kda(y, places, weights), x

    def head_leave(self, x: Tensor, y: Tensor, gate: Tensor, weights: Weights) -> Tensor:
        y = self._gated_norm(y, gate, weights["self_attn.o_norm.weight"])
        x = x + self._linear(y, weights, "self_attn.o_proj").float()
        y = self._norm(x, weights["post_attention_layernorm.weight"])
        y = F.silu(self._linear(y, weights, "mlp.gate_proj")) * self._linear(y, weights, "mlp.up_proj")
        return self._norm(x + self._linear(y, weights, "mlp.down_proj").float(), weights["norm.weight"])

    def losses(self, hidden: Tensor, targets: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
        logits = _linear(hidden, output, self.dtype).float()
        return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets

    def _project_kda(self, x: Tensor, places: Tensor, weights: Weights) -> tuple[Tensor, ...]:
        heads = (len(x), *self.kda_heads)
        taps = weights["self_attn.conv1d.weight"].float().squeeze(1)  # [3 * H * 128, width]
        mixed = torch.cat([self._linear(x, weights, f"self_attn.{name}_proj") for name in "qkv"], dim=-1)
        mixed = F.silu(_convolve(mixed.float(), taps, places)).to(self.dtype)
        q, k, v = (part.reshape(heads) for part in mixed.chunk(3, dim=-1))
        raw = self._linear(self._linear(x, weights, f"{FORGET}f_a_proj"), weights, f"{FORGET}f_b_proj")
        raw = (raw.float() + weights[f"{FORGET}dt_bias"].float()).view(heads)
        rate = weights[f"{FORGET}A_log"].float().exp()[:, None]
        g = self.lower_bound * torch.sigmoid(rate * raw)
        beta = torch.sigmoid(self._linear(x, weights, "self_attn.b_proj").float()).to(self.dtype)
        gate = self._linear(self._linear(x, weights, "self_attn.g_a_proj"), weights, "self_attn.g_b_proj")
        return q, k, v, g, beta, gate

    def _gated_norm(self, y: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """A norm over each head of [N, H * 128], times the sigmoid of the gate."""
        heads = y.float().view(len(y), -1, weight.shape[0])
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.eps) * weight.float()
        return (normed.flatten(1) * torch.sigmoid(gate.float())).to(self.dtype)

    def _collapse(self, streams: Tensor, weights: Weights, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """The input of a sublayer [N, D] from the streams [N, M, D]; where its output goes [N, M], and the mix."""
        m, eps = self.hc_mult, self.hc_eps
        flat = streams.flatten(1)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        scale = weights[f"{name}scale"].float()
        pre, post, mix = F.linear(flat, weights[f"{name}fn"].float()).split([m, m, m * m], dim=-1)
        pre_base, post_base, mix_base = weights[f"{name}base"].float().split([m, m, m * m])
        pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
        post = 2 * torch.sigmoid(post * scale[1] + post_base)
        mix = torch.softmax((mix * scale[2] + mix_base).view(-1, m, m), dim=-1) + eps
        mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self.hc_sinkhorn_iters - 1):
            mix = mix / (mix.sum(dim=-1, keepdim=True) + eps)
            mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
        return (pre[..., None] * streams).sum(1), post, mix

    def _expand(self, streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        mixed = (mix[..., None] * streams[:, :, None]).sum(1)  # of stream j: the sum over i of mix[i, j] * stream i
        return post[..., None] * y.float()[:, None] + mixed

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight.float()

    def _linear(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        return _linear(x, weights[f"{name}.weight"], self.dtype)


FORGET = "self_attn.forget_gate."


def _linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype))


def _convolve(x: Tensor, taps: Tensor, places: Tensor) -> Tensor:
    """A causal convolution of [N, C] along N with [C, width] taps that does not look over the start of a row."""
    width = taps.shape[1]
    out = x * taps[:, -1]
    for back in range(1, width):
        shifted = F.pad(x, (0, 0, back, 0))[: len(x)]
        out = out + torch.where((places >= back)[:, None], shifted, 0.0) * taps[:, width - 1 - back]
    return out


def _places(rows: int, length: int, device: torch.device) -> Tensor:
    """Each token's place in its row: [rows * length]."""
    return torch.arange(length, device=device).repeat(rows)
