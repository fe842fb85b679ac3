"""What the plugin's adapters rely on in vLLM's sources, one tuple a part; `seams` puts them together by version.

`Text` facts pin the code whose meaning matters. Where a version differs in such a text only, its digest stands in
`seams`, beside the version.
"""

from __future__ import annotations

from ..contract import Accepts, Constant, Derives, Fact, Imports, Members, Parameters, Text

GDN = "vllm.v1.attention.backends.gdn_attn"
KIMI = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
GLM = "vllm.models.glm5next.common.kda"
GLM_0_30 = "vllm.models.glm5next.nvidia.kda"
K3 = "vllm.models.kimi_k3.nvidia.kda"
K3_ROCM = "vllm.models.kimi_k3.amd.kda"
K3_METADATA = "vllm.models.kimi_k3.nvidia.kda_metadata"
BASE = "vllm.model_executor.layers.mamba.gdn.base"
MAMBA_UTILS = "vllm.model_executor.layers.mamba.mamba_utils"
BREAK = "vllm.compilation.breakable_cudagraph"
CONV = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
CHECKPOINT = "vllm.model_executor.layers.mamba.checkpoint"
KDA_CHECKPOINT = "vllm.model_executor.layers.mamba.kda_checkpoint"
K3_DECODE = "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent"
GLM_DECODE = "vllm.models.glm5next.nvidia.ops.third_party.kda.fused_recurrent"

BUILD_PARAMETERS = (
    "common_prefix_len",
    "common_attn_metadata",
    "num_accepted_tokens",
    "num_decode_draft_tokens_cpu",
    "fast_build",
)
METADATA_FIELDS = (
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_spec_decodes",
    "num_actual_tokens",
    "has_initial_state",
    "non_spec_query_start_loc",
    "non_spec_state_indices_tensor",
    "non_spec_token_indx",
    "spec_query_start_loc",
    "spec_state_indices_tensor",
    "spec_token_indx",
    "num_accepted_tokens",
)
LAYER_MEMBERS = ("prefix", "num_spec", "kv_cache", "A_log", "dt_bias", "head_dim", "local_num_heads", "get_state_dtype")
LAYER_BASES = ((BASE, "GatedDeltaNetAttention"), ("vllm.model_executor.layers.mamba.abstract", "MambaBase"))
LAYER_PARAMETERS = ("config", "vllm_config", "prefix")
PACKED_PARAMETERS = ("mixed_qkv", "g1", "g2", "beta", "core_attn_out")
PACKED_MEMBERS = (*LAYER_MEMBERS, "conv1d", "o_norm", "gate_lower_bound", "local_projection_size")

COMMON: tuple[Fact, ...] = (
    Members("vllm.config.vllm", "VllmConfig", ("additional_config", "scheduler_config", "model_config")),
    Parameters("vllm.config.vllm", "VllmConfig.__post_init__", ()),
    Members("vllm.config.scheduler", "SchedulerConfig", ("max_num_batched_tokens", "max_num_seqs")),
    Parameters("vllm.forward_context", "get_forward_context", ()),
    Members("vllm.forward_context", "ForwardContext", ("attn_metadata",)),
    Parameters("vllm.v1.worker.workspace", "current_workspace_manager", ()),
    Parameters("vllm.v1.worker.workspace", "WorkspaceManager.get_simultaneous", ("*shapes_and_dtypes",)),
    Parameters(MAMBA_UTILS, "is_conv_state_dim_first", ()),
    Constant("vllm.v1.attention.backends.utils", "NULL_BLOCK_ID", 0),
    Members("vllm.v1.attention.backend", "CommonAttentionMetadata", ("query_start_loc_cpu",)),
    Parameters(BASE, "GatedDeltaNetAttention.__init__", LAYER_PARAMETERS),
    Parameters(GDN, "GDNAttentionMetadataBuilder.build", BUILD_PARAMETERS),
    Members(GDN, "GDNAttentionMetadata", METADATA_FIELDS),
    Derives(KIMI, "KimiGatedDeltaNetAttention", "GatedDeltaNetAttention"),
    Parameters(KIMI, "KimiGatedDeltaNetAttention.__init__", LAYER_PARAMETERS),
)

# Kimi-Linear until 0.26: q, k and v projected and convolved one by one.
KIMI_SEPARATE: tuple[Fact, ...] = (
    Parameters(
        KIMI,
        "KimiGatedDeltaNetAttention._forward",
        ("q_proj_states", "k_proj_states", "v_proj_states", "g1", "beta", "core_attn_out"),
    ),
    Members(KIMI, "KimiGatedDeltaNetAttention", (*LAYER_MEMBERS, "q_conv1d", "k_conv1d", "v_conv1d"), LAYER_BASES),
    Imports(KIMI, ("causal_conv1d_fn", "is_conv_state_dim_first", "get_forward_context")),
    Accepts(
        CONV,
        "causal_conv1d_fn",
        ("x", "weight", "bias"),
        ("activation", "conv_states", "has_initial_state", "cache_indices", "query_start_loc", "metadata"),
    ),
    Text(KIMI, "KimiGatedDeltaNetAttention.forward", "0af5e13a58591acd"),
    Text(KIMI, "KimiGatedDeltaNetAttention._forward", "fa5393b5ea593f8f"),
    Text(KIMI, "kda_attention", "e7e57f6cbb3ba50c"),
    Text(CONV, "_causal_conv1d_fwd_kernel", "6ab515c95af9ff0f"),
    Text(MAMBA_UTILS, "MambaStateShapeCalculator.kda_state_shape", "acff0cf775833878"),
)

# Kimi-Linear from 0.27 on: one projection and one convolution.
KIMI_PACKED: tuple[Fact, ...] = (
    Parameters(BREAK, "eager_break_during_capture", ("fn",)),
    Imports(KIMI, ("get_forward_context",)),
    Parameters(KIMI, "KimiGatedDeltaNetAttention._forward", PACKED_PARAMETERS),
    Members(KIMI, "KimiGatedDeltaNetAttention", PACKED_MEMBERS, LAYER_BASES),
    Text(K3_DECODE, "fused_recurrent_kda_fwd_kernel", "c31adf137cf96562"),
    Text(K3_DECODE, "fused_recurrent_kda_packed_decode_kernel", "b0d67979cf7a8d02"),
    Text(MAMBA_UTILS, "MambaStateShapeCalculator.kda_state_shape", "5c14c54b4939298c"),
)

# Kimi-K3 from 0.30 on.
K3_LAYER: tuple[Fact, ...] = (
    Imports(K3, ("get_forward_context",)),
    Derives(K3, "KimiK3DeltaAttention", "GatedDeltaNetAttention"),
    Parameters(K3, "KimiK3DeltaAttention.__init__", (*LAYER_PARAMETERS, "aux_stream", "run_gemm_rs_ar")),
    Parameters(K3, "KimiK3DeltaAttention._forward", PACKED_PARAMETERS),
    Parameters(K3, "KimiK3DeltaAttention.get_kv_cache_spec", ("vllm_config",)),
    Members(K3, "KimiK3DeltaAttention", (*PACKED_MEMBERS, "kda_prefill_backend", "use_recoverssm"), LAYER_BASES),
    Parameters(K3_METADATA, "KimiK3KDAMetadataBuilder.build", BUILD_PARAMETERS),
    Derives(K3_METADATA, "KimiK3KDAMetadata", "GDNAttentionMetadata"),
    Members(
        "vllm.v1.kv_cache_interface",
        "MambaSpec",
        ("num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"),
    ),
    Members(K3_ROCM, "KimiK3DeltaAttention", ("__init__",)),
    Text(K3, "resolve_kda_prefill_backend", "c68dff20acedb829"),
)


def glm_layer(module: str) -> tuple[Fact, ...]:
    """GLM-5.3-Flash's layer, which is the same in every version that has one, but not where it lies."""
    return (
        Imports(module, ("get_forward_context",)),
        Derives(module, "Glm5NextLinearAttention", "GatedDeltaNetAttention"),
        Parameters(module, "Glm5NextLinearAttention.__init__", LAYER_PARAMETERS),
        Parameters(module, "Glm5NextLinearAttention._forward", ("qkv_proj_states", "g1", "beta", "core_attn_out")),
        Members(
            module,
            "Glm5NextLinearAttention",
            (
                *LAYER_MEMBERS,
                "q_conv1d",
                "k_conv1d",
                "v_conv1d",
                "local_projection_size",
                "kda_lower_bound",
                "kda_prefill_backend",
                "_merged_conv_weight",
                "_conv_state_dim_first",
            ),
            LAYER_BASES,
        ),
        Text(module, "Glm5NextLinearAttention.forward", "cdc80be9d1b847cd"),
        Text(module, "_resolve_kda_prefill_backend", "f520ce2dca93d333"),
    )


# Until 0.31 GLM-5.3-Flash exports no checkpoints.
GLM_WITHOUT_CHECKPOINTS: tuple[Fact, ...] = (
    Text(GLM_DECODE, "fused_recurrent_gated_delta_rule_fwd_kernel", "7b2f15893d768942"),
)

GLM_WITH_CHECKPOINTS: tuple[Fact, ...] = (
    Members(GDN, "GDNAttentionMetadata", ("checkpoint",)),
    Members(CHECKPOINT, "MambaPrefillCheckpointMetadata", ("offsets",)),
    Parameters(GLM, "Glm5NextLinearAttention.get_kv_cache_spec", ("vllm_config",)),
    Text(GLM, "Glm5NextLinearAttention._forward", "55a7de07c1255b36"),
    Text(GLM, "Glm5NextLinearAttention.get_kv_cache_spec", "f4fa10e3abb57df1"),
    Text(GLM_DECODE, "fused_recurrent_gated_delta_rule_fwd_kernel", "89a106a71e48894b"),
    Text(K3_METADATA, "KimiK3KDAMetadataBuilder.build", "5e95555a5198aba6"),
)

# All layers from 0.31 on: checkpoints have a module of their own, and a group's metadata may come from another's.
SHARED_CHECKPOINTS: tuple[Fact, ...] = (
    Members(CHECKPOINT, "MambaPrefillCheckpointMetadata", ("checkpoint_offsets", "state_indices")),
    Parameters(GDN, "GDNAttentionMetadataBuilder.update_block_table", ("metadata", "blk_table", "slot_mapping")),
    Text(KIMI, "KimiGatedDeltaNetAttention.forward", "7d5d17d60326ab29"),
    Text(KIMI, "KimiGatedDeltaNetAttention._forward", "d25aaa0071758e7d"),
    Text(K3, "KimiK3DeltaAttention.forward", "fae2461df2b9f0f0"),
    Text(K3, "KimiK3DeltaAttention.get_kv_cache_spec", "f4fa10e3abb57df1"),
)
