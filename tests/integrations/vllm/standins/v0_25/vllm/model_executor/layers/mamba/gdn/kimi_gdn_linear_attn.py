import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

__all__ = ["KimiGatedDeltaNetAttention", "causal_conv1d_fn", "is_conv_state_dim_first"]


class Convolution(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width), requires_grad=False)
        self.bias = None


class KimiGatedDeltaNetAttention(GatedDeltaNetAttention):
    def __init__(self, config, vllm_config, prefix="") -> None:
        super().__init__(config, vllm_config, prefix)
        channels = config.num_heads * config.head_dim
        self.q_conv1d = Convolution(channels, 4)
        self.k_conv1d = Convolution(channels, 4)
        self.v_conv1d = Convolution(channels, 4)
        self.A_log = nn.Parameter(torch.randn(1, 1, config.num_heads, 1), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.randn(channels), requires_grad=False)

    def _forward(self, q_proj_states, k_proj_states, v_proj_states, g1, beta, core_attn_out) -> None:
        found = get_forward_context().attn_metadata
        self.own_step(found and found.get(self.prefix))
