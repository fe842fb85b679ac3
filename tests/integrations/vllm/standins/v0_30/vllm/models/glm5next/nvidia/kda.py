import torch
from torch import nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import Convolution
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import MambaSpec

NAMES = ("auto", "triton", "flashkda")


class Glm5NextLinearAttention(GatedDeltaNetAttention):
    def __init__(self, config, vllm_config, prefix="") -> None:
        super().__init__(config, vllm_config, prefix)
        channels = config.num_heads * config.head_dim
        self.local_projection_size = channels
        self.q_conv1d = Convolution(channels, 4)
        self.k_conv1d = Convolution(channels, 4)
        self.v_conv1d = Convolution(channels, 4)
        self._merged_conv_weight = None
        self.A_log = nn.Parameter(torch.randn(1, 1, config.num_heads, 1), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.randn(channels), requires_grad=False)
        self.kda_lower_bound = config.lower_bound
        self._conv_state_dim_first = is_conv_state_dim_first()
        backend = vllm_config.additional_config.get("kda_prefill_backend", "auto")
        if backend not in NAMES:
            raise ValueError(f"Unsupported KDA prefill backend: {backend}")
        self.kda_prefill_backend = backend

    def get_kv_cache_spec(self, vllm_config) -> MambaSpec:
        return MambaSpec()

    @eager_break_during_capture
    def _forward(self, qkv_proj_states, g1, beta, core_attn_out) -> None:
        found = get_forward_context().attn_metadata
        self.own_step(found and found.get(self.prefix))
