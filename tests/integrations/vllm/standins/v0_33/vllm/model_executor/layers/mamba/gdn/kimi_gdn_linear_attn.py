import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention


class Convolution(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width), requires_grad=False)
        self.bias = None


class GatedNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim), requires_grad=False)
        self.eps = 1e-5

    def forward(self, x, g):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return normed * torch.sigmoid(g)


class KimiGatedDeltaNetAttention(GatedDeltaNetAttention):
    def __init__(self, config, vllm_config, prefix="") -> None:
        super().__init__(config, vllm_config, prefix)
        backend = vllm_config.additional_config.get("kda_prefill_backend", "auto")
        assert backend in ("auto", "triton"), backend
        channels = config.num_heads * config.head_dim
        self.local_projection_size = channels
        self.conv1d = Convolution(3 * channels, 4)
        self.A_log = nn.Parameter(torch.randn(config.num_heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.randn(channels), requires_grad=False)
        self.gate_lower_bound = config.lower_bound
        self.o_norm = GatedNorm(config.head_dim)

    @eager_break_during_capture
    def _forward(self, mixed_qkv, g1, g2, beta, core_attn_out) -> None:
        found = get_forward_context().attn_metadata
        self.own_step(found and found.get(self.prefix))
