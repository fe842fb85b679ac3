from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import Convolution, GatedNorm, nn, torch
from vllm.v1.kv_cache_interface import MambaSpec

NAMES = ("auto", "triton", "flashkda", "flashinfer")


class KimiK3DeltaAttention(GatedDeltaNetAttention):
    def __init__(self, config, vllm_config, prefix="", aux_stream=None, run_gemm_rs_ar=False) -> None:
        super().__init__(config, vllm_config, prefix)
        backend = vllm_config.additional_config.get("kda_prefill_backend", "auto")
        if backend not in NAMES:
            raise ValueError(f"Unsupported KDA prefill backend: {backend}")
        self.kda_prefill_backend = backend
        self.use_recoverssm = config.use_recoverssm
        channels = config.num_heads * config.head_dim
        self.local_projection_size = channels
        self.conv1d = Convolution(3 * channels, 4)
        self.A_log = nn.Parameter(torch.randn(config.num_heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.randn(channels), requires_grad=False)
        self.gate_lower_bound = config.lower_bound
        self.o_norm = GatedNorm(config.head_dim)

    def get_kv_cache_spec(self, vllm_config) -> MambaSpec:
        return MambaSpec()

    @eager_break_during_capture
    def _forward(self, mixed_qkv, g1, g2, beta, core_attn_out) -> None:
        found = get_forward_context().attn_metadata
        self.own_step(found and found.get(self.prefix))
