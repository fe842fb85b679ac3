"""The model that is trained: a small glm5_next text model and its MTP head. Needs transformers."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import nn

VOCABULARY = 256  # a token is a byte
END = 0  # the token between documents; also padding
CONTEXT = 16_384  # attention reads up to this many cached tokens in full
HALF_LIVES = (1.0, 4096.0)  # tokens; decays start spread over this range
HEAD_LAYER = 0  # the MTP head's KDA layer has the dimensions of this layer of the model


def text_config(**changes: Any) -> Any:
    """The shipped model's `Glm5NextTextConfig`; `changes` replace single values, for smaller models in tests.

    Every feed-forward is dense, and `index_topk` covers the whole context, so that attention is exact: the indexer
    exists as the family requires, but chooses everything and is not trained.
    """
    from transformers.models.glm5_next import Glm5NextTextConfig

    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "linear_num_heads": 2,
        "linear_head_dim": 128,
        "linear_lower_bound": -5.0,
        "num_attention_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "index_topk": CONTEXT,
        "index_kpool": 16,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": END,
        "eos_token_id": END,
    }
    values |= changes
    layers = values["num_hidden_layers"]
    values["num_key_value_heads"] = values["num_attention_heads"]
    values["layer_types"] = ["deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    values["mlp_layer_types"] = ["dense"] * layers
    values.update(n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)  # of no layer
    return Glm5NextTextConfig(**values)


def build(text: Any, seed: int = 0) -> tuple[Any, MtpHead]:
    """A fresh model (`Glm5NextForConditionalGeneration`) and MTP head in float32 on the CPU.

    The class requires a vision tower; it gets the smallest one, which is never run.
    """
    transformers: Any = importlib.import_module("transformers")
    from transformers.models.glm5_next import Glm5NextVisionConfig

    vision = Glm5NextVisionConfig(
        depth=1,
        hidden_size=16,
        num_heads=2,
        intermediate_size=16,
        out_hidden_size=text.hidden_size,
        projection_intermediate_size=16,
    )
    config = transformers.Glm5NextConfig(text_config=text, vision_config=vision, eos_token_id=END, pad_token_id=END)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Glm5NextForConditionalGeneration(config)
        head = MtpHead(text)
        for module in (model.model.language_model, head):
            _initialise(module)
    return model, head


class MtpHead(nn.Module):
    """The MTP head's parameters, by the names that `rapidkda.engine` loads; `forward.py` computes with them.

    From the hidden state of token i and the embedding of token i + 1 it predicts token i + 2 through the model's own
    output head.
    """

    def __init__(self, text: Any):
        super().__init__()
        family: Any = importlib.import_module("transformers.models.glm5_next.modeling_glm5_next")

        size = text.hidden_size
        self.enorm = family.Glm5NextTextRMSNorm(size, text.rms_norm_eps)
        self.hnorm = family.Glm5NextTextRMSNorm(size, text.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = family.Glm5NextTextRMSNorm(size, text.rms_norm_eps)
        self.self_attn = family.Glm5NextTextLinearAttention(text, HEAD_LAYER)
        self.post_attention_layernorm = family.Glm5NextTextRMSNorm(size, text.rms_norm_eps)
        self.mlp = family.Glm5NextTextMLP(text)
        self.norm = family.Glm5NextTextRMSNorm(size, text.rms_norm_eps)


def _initialise(module: nn.Module) -> None:
    """Matrices keep variance, sublayers start at zero, taps near the identity, half-lives log-uniform."""
    for name, parameter in module.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner.endswith("conv1d"):
            nn.init.normal_(parameter, std=0.1)
            parameter.data[..., -1] += 1.0
        elif last == "A_log":
            nn.init.zeros_(parameter)
        elif last == "dt_bias":
            low, high = (math.log(tokens) for tokens in HALF_LIVES)
            halves = torch.empty_like(parameter).uniform_(low, high).exp()
            decay = math.log(2) / (5.0 * halves)  # in units of the lower bound -5
            parameter.data.copy_(torch.log(decay) - torch.log1p(-decay))
        elif owner.endswith(("o_proj", "down_proj")):
            nn.init.zeros_(parameter)
        elif owner.endswith("embed_tokens"):
            nn.init.normal_(parameter, std=1.0)
        elif owner.endswith("f_b_proj"):
            nn.init.normal_(parameter, std=0.3 * parameter.shape[1] ** -0.5)  # the spread of dt_bias comes first
        elif parameter.dim() == 2 and owner.endswith("proj"):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
