"""A Kimi-Linear checkpoint with random weights, as published ones lie on disk: a model for runs that need no sense.

    python scripts/kimi_linear_checkpoint.py FOLDER --seed 0 --layers 8

The widths are those of Kimi-Linear-48B-A3B: hidden size 2304, 32 KDA heads of 128, latent attention of rank 512 with
keys of 128 + 64, every fourth layer. The feed-forward parts are dense, 9216 wide, which is what the published model's
active experts add up to. The tokenizer's tokens are bytes.

Greedy tokens of random weights hang on near-ties, which rounding decides. So the first layer is built, and the others
are random: its state stores, for each token, the token that followed it last, and the output head reads that token.
The greedy continuation is known beforehand (`continuation`) and hangs on the layer's state and convolution being right;
all layers' arithmetic shows in the log-probabilities. The decays of the random layers' gates are spread from 1e-3 to 1
a token, so states remember thousands of tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

END = "<|end|>"
VOCABULARY = 320  # 256 bytes, the end token, and what rounds it up to a multiple of 64
RECALLS = "recalls_followers"  # entry of config.json: `continuation` holds for this checkpoint
COMMON = 0.3  # share of all embeddings' common direction, from which the first layer's beta is read
RECALL = 0.8  # size of what the first layer adds, in units of the embeddings


@dataclass(frozen=True)
class Sizes:
    """Widths of the model; see the head of this file for where the defaults come from."""

    layers: int = 8
    hidden: int = 2304
    heads: int = 32
    head_dim: int = 128
    latent: int = 512
    rope_dim: int = 64
    feed_forward: int = 9216
    conv: int = 4

    @property
    def attention_layers(self) -> list[int]:
        """Latent attention, every fourth layer; numbered from 1 as in the configuration."""
        return [layer for layer in range(1, self.layers + 1) if layer % 4 == 0]

    @property
    def kda_layers(self) -> list[int]:
        return [layer for layer in range(1, self.layers + 1) if layer % 4 != 0]


def configuration(sizes: Sizes) -> dict[str, object]:
    """The contents of config.json."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        RECALLS: True,
        "vocab_size": VOCABULARY,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.feed_forward,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "q_lora_rank": None,
        "kv_lora_rank": sizes.latent,
        "qk_nope_head_dim": sizes.head_dim,
        "qk_rope_head_dim": sizes.rope_dim,
        "v_head_dim": sizes.head_dim,
        "mla_use_nope": True,
        "num_experts": None,
        "first_k_dense_replace": sizes.layers,
        "max_position_embeddings": 131072,
        "model_max_length": 131072,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": 256,
        "linear_attn_config": {
            "full_attn_layers": sizes.attention_layers,
            "kda_layers": sizes.kda_layers,
            "head_dim": sizes.head_dim,
            "num_heads": sizes.heads,
            "short_conv_kernel_size": sizes.conv,
        },
    }


def weights(sizes: Sizes, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Every tensor of the model, by its name in published checkpoints; bfloat16, the gates' parameters float32."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        """A linear layer [rows, columns] that keeps the variance of its input, times scale."""
        drawn = torch.randn(rows, columns, generator=generator, device=device)
        return (drawn * (scale / math.sqrt(columns))).to(torch.bfloat16)

    def ones(count: int) -> Tensor:
        return torch.ones(count, dtype=torch.bfloat16, device=device)

    hidden, wide = sizes.hidden, sizes.heads * sizes.head_dim

    def kda(prefix: str) -> dict[str, Tensor]:
        made = {f"{name}_proj.weight": normal(wide, hidden) for name in "qkv"}
        for name in "qkv":
            made[f"{name}_conv1d.weight"] = normal(wide, sizes.conv, 2.0).unsqueeze(1)
        for gate in "fg":
            made[f"{gate}_a_proj.weight"] = normal(sizes.head_dim, hidden)
            made[f"{gate}_b_proj.weight"] = normal(wide, sizes.head_dim)
        step = torch.rand(wide, generator=generator, device=device) * math.log(1000.0) + math.log(1e-3)
        made["dt_bias"] = step.exp().expm1().log()  # softplus(dt_bias) is spread from 1e-3 to 1
        made["A_log"] = torch.zeros(1, 1, sizes.heads, 1, device=device)
        made["b_proj.weight"] = normal(sizes.heads, hidden)
        made["o_norm.weight"] = ones(sizes.head_dim)
        made["o_proj.weight"] = normal(hidden, wide, 2.0)
        return {prefix + name: tensor for name, tensor in made.items()}

    def attention(prefix: str) -> dict[str, Tensor]:
        key = sizes.head_dim + sizes.rope_dim
        made = {
            "q_proj.weight": normal(sizes.heads * key, hidden, 2.0),
            "kv_a_proj_with_mqa.weight": normal(sizes.latent + sizes.rope_dim, hidden),
            "kv_a_layernorm.weight": ones(sizes.latent),
            "kv_b_proj.weight": normal(sizes.heads * 2 * sizes.head_dim, sizes.latent),
            "o_proj.weight": normal(hidden, wide, 2.0),
        }
        return {prefix + name: tensor for name, tensor in made.items()}

    def memory(prefix: str, common: Tensor) -> dict[str, Tensor]:
        """A KDA layer that returns the token that last followed the current one.

        The key is the previous token (its convolution reads one place back), the query the current one, in the same
        code; the value is the current token. beta is nearly 1, so the newest entry of a token replaces older ones.
        """
        made = kda("")

        def codes(scale: float) -> Tensor:
            drawn = normal(wide, hidden, scale).float()
            return (drawn - torch.outer(drawn @ common, common) / hidden).to(torch.bfloat16)

        made["q_proj.weight"] = codes(0.5)
        made["k_proj.weight"] = made["q_proj.weight"].clone()
        made["v_proj.weight"] = codes(1.0)
        for name, place in (("q", -1), ("k", -2), ("v", -1)):
            taps = torch.zeros(wide, 1, sizes.conv, device=device)
            taps[:, :, place] = 1.0
            made[f"{name}_conv1d.weight"] = taps.to(torch.bfloat16)
        made["b_proj.weight"] = (common * (4.0 / COMMON / hidden)).expand(sizes.heads, hidden).to(torch.bfloat16)
        made["dt_bias"] = torch.full((wide,), -6.0, device=device)
        made["f_b_proj.weight"] = normal(wide, sizes.head_dim, 0.3)
        made["g_b_proj.weight"] = torch.zeros(wide, sizes.head_dim, dtype=torch.bfloat16, device=device)
        made["o_proj.weight"] = normal(hidden, wide, 2.0 * RECALL)  # the output norm's gate is a half
        return {prefix + name: tensor for name, tensor in made.items()}

    common = torch.randn(hidden, generator=generator, device=device)
    common *= math.sqrt(hidden) / common.norm()
    own = torch.randn(VOCABULARY, hidden, generator=generator, device=device)
    embedding = COMMON * common + math.sqrt(1 - COMMON**2) * own
    first = memory("", common)
    found = {"model.embed_tokens.weight": embedding.to(torch.bfloat16), "model.norm.weight": ones(hidden)}
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        if layer == 0:
            found |= {f"{prefix}self_attn.{name}": tensor for name, tensor in first.items()}
        else:
            found |= (kda if layer + 1 in sizes.kda_layers else attention)(prefix + "self_attn.")
        found |= {f"{prefix}{norm}_layernorm.weight": ones(hidden) for norm in ("input", "post_attention")}
        found[prefix + "mlp.gate_proj.weight"] = normal(sizes.feed_forward, hidden)
        found[prefix + "mlp.up_proj.weight"] = normal(sizes.feed_forward, hidden)
        found[prefix + "mlp.down_proj.weight"] = normal(hidden, sizes.feed_forward)
    # A token's row is what the first layer adds when it recalls that token, without what all tokens share.
    value = torch.nn.functional.silu(embedding[:256] @ first["v_proj.weight"].float().T).view(256, sizes.heads, -1)
    value = value / value.square().mean(-1, keepdim=True).sqrt()
    recalled = value.flatten(1) @ first["o_proj.weight"].float().T
    recalled = recalled - recalled.mean(0)
    head = torch.zeros(VOCABULARY, hidden, device=device)
    head[:256] = 1.5 * recalled / recalled.norm(dim=1, keepdim=True)
    found["lm_head.weight"] = head.to(torch.bfloat16)
    return found


def recalls(folder: Path) -> bool:
    """Whether a checkpoint was written by this file, so that `continuation` holds."""
    return bool(json.loads((folder / "config.json").read_text()).get(RECALLS, False))


def continuation(prompt: bytes, count: int) -> bytes | None:
    """The tokens that the first layer recalls after a prompt; None when one of them has not been seen before."""
    follower = dict(itertools.pairwise(prompt))
    made = [prompt[-1]]
    while len(made) <= count:
        if made[-1] not in follower:
            return None
        made.append(follower[made[-1]])
    return bytes(made[1:])


def tokenizer() -> Tokenizer:
    """Token i is byte i; token 256 ends a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves in such files
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        alphabet.setdefault(byte, chr(256 + len(alphabet) - len(printable)))
    made = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    return made


def write(folder: Path, sizes: Sizes, seed: int) -> None:
    """Write the checkpoint; about 0.2 GB a layer with the default sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = weights(sizes, seed, device)
    save_file({name: tensor.contiguous().cpu() for name, tensor in made.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(configuration(sizes), indent=2))
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    arguments = parser.parse_args()
    write(arguments.folder, Sizes(layers=arguments.layers), arguments.seed)


if __name__ == "__main__":
    main()
