"""The places where the plugin meets vLLM, version by version, as data.

A seam lists the layer classes that the plugin takes over (their `_forward`, in steps with a prefill), the metadata
builders that know the step's lengths on the host, and every fact of the sources that this rests on. A version is
supported when it has a seam here and its installed sources agree with all facts of it.

Facts of all supported versions: the state pool is [slots, H, V, K] (V-first); the convolution history is
[slots, L, 3*H*D] or [slots, 3*H*D, L], oldest entry first; slot 0 is padding; a speculative request has one state slot
a position, and its history and state are read at position `num_accepted_tokens - 1`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .contract import Accepts, Constant, Derives, Fact, Imports, Members, Parameters, Text

Kind = Literal["kimi_separate", "kimi_packed", "glm"]

GDN = "vllm.v1.attention.backends.gdn_attn"
KIMI = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
GLM = "vllm.models.glm5next.common.kda"
K3 = "vllm.models.kimi_k3.nvidia.kda"
K3_ROCM = "vllm.models.kimi_k3.amd.kda"
K3_METADATA = "vllm.models.kimi_k3.nvidia.kda_metadata"
BASE = "vllm.model_executor.layers.mamba.gdn.base"
MAMBA_UTILS = "vllm.model_executor.layers.mamba.mamba_utils"
BREAK = "vllm.compilation.breakable_cudagraph"
CONV = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
CHECKPOINT = "vllm.model_executor.layers.mamba.checkpoint"
K3_DECODE = "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent"
GLM_DECODE = "vllm.models.glm5next.nvidia.ops.third_party.kda.fused_recurrent"


@dataclass(frozen=True)
class LayerSeam:
    """One layer class.

    Attributes:
        kind: which adapter of `rapidkda.integrations.vllm.layers` serves it.
        eager_break: `_forward` must stay a break point of vLLM's breakable CUDA graphs.
        checkpoints: the layer exports prefix-cache checkpoints during prefill.
        resolver: its `__init__` refuses backend names that it does not know.
    """

    module: str
    cls: str
    kind: Kind
    model: str
    eager_break: bool = False
    checkpoints: bool = False
    resolver: bool = False


@dataclass(frozen=True)
class BuilderSeam:
    """One metadata builder class. `update`: it may derive a group's metadata from another group's."""

    module: str
    cls: str
    update: bool = False


@dataclass(frozen=True)
class RefusedLayer:
    """A KDA layer class of a supported version that the plugin cannot take over."""

    module: str
    cls: str
    reason: str


@dataclass(frozen=True)
class Seam:
    """Everything about vLLM versions that are alike where the plugin meets them."""

    versions: tuple[str, ...]
    layers: tuple[LayerSeam, ...]
    builders: tuple[BuilderSeam, ...]
    refused: tuple[RefusedLayer, ...]
    facts: tuple[Fact, ...]


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

COMMON_FACTS: tuple[Fact, ...] = (
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
)

VLLM_0_25 = Seam(
    versions=("0.25.0", "0.25.1"),
    layers=(LayerSeam(KIMI, "KimiGatedDeltaNetAttention", "kimi_separate", "Kimi-Linear"),),
    builders=(BuilderSeam(GDN, "GDNAttentionMetadataBuilder"),),
    refused=(),
    facts=(
        *COMMON_FACTS,
        Derives(KIMI, "KimiGatedDeltaNetAttention", "GatedDeltaNetAttention"),
        Parameters(KIMI, "KimiGatedDeltaNetAttention.__init__", LAYER_PARAMETERS),
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
        Text(
            "vllm.model_executor.layers.fla.ops.fused_recurrent",
            "fused_recurrent_gated_delta_rule_fwd_kernel",
            "98fffa42b9a8835d",
        ),
        Text(CONV, "_causal_conv1d_fwd_kernel", "6ab515c95af9ff0f"),
        Text(MAMBA_UTILS, "MambaStateShapeCalculator.kda_state_shape", "acff0cf775833878"),
        Text(GDN, "GDNAttentionMetadataBuilder.build", "adfdb58cef9adfe3"),
    ),
)

_PACKED_PARAMETERS = ("mixed_qkv", "g1", "g2", "beta", "core_attn_out")
_PACKED_MEMBERS = (*LAYER_MEMBERS, "conv1d", "o_norm", "gate_lower_bound", "local_projection_size")

_PACKED_LAYERS = (
    LayerSeam(KIMI, "KimiGatedDeltaNetAttention", "kimi_packed", "Kimi-Linear", eager_break=True, resolver=True),
    LayerSeam(K3, "KimiK3DeltaAttention", "kimi_packed", "Kimi-K3", True, checkpoints=True, resolver=True),
    LayerSeam(GLM, "Glm5NextLinearAttention", "glm", "GLM-5.3-Flash", True, checkpoints=True, resolver=True),
)
_PACKED_BUILDERS = (
    BuilderSeam(GDN, "GDNAttentionMetadataBuilder", update=True),
    BuilderSeam(K3_METADATA, "KimiK3KDAMetadataBuilder"),
)
_PACKED_REFUSED = (RefusedLayer(K3_ROCM, "KimiK3DeltaAttention", "vLLM's ROCm layer of Kimi-K3 has a seam of its own"),)

_PACKED_FACTS: tuple[Fact, ...] = (
    *COMMON_FACTS,
    Parameters(BREAK, "eager_break_during_capture", ("fn",)),
    Imports(KIMI, ("get_forward_context",)),
    Imports(K3, ("get_forward_context",)),
    Imports(GLM, ("get_forward_context",)),
    Members(CHECKPOINT, "MambaPrefillCheckpointMetadata", ("checkpoint_offsets", "state_indices")),
    Parameters(GDN, "GDNAttentionMetadataBuilder.update_block_table", ("metadata", "blk_table", "slot_mapping")),
    Members(
        "vllm.v1.kv_cache_interface",
        "MambaSpec",
        ("num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"),
    ),
    Derives(KIMI, "KimiGatedDeltaNetAttention", "GatedDeltaNetAttention"),
    Parameters(KIMI, "KimiGatedDeltaNetAttention.__init__", LAYER_PARAMETERS),
    Parameters(KIMI, "KimiGatedDeltaNetAttention._forward", _PACKED_PARAMETERS),
    Members(KIMI, "KimiGatedDeltaNetAttention", _PACKED_MEMBERS, LAYER_BASES),
    Derives(K3, "KimiK3DeltaAttention", "GatedDeltaNetAttention"),
    Parameters(K3, "KimiK3DeltaAttention.__init__", (*LAYER_PARAMETERS, "aux_stream", "run_gemm_rs_ar")),
    Parameters(K3, "KimiK3DeltaAttention._forward", _PACKED_PARAMETERS),
    Parameters(K3, "KimiK3DeltaAttention.get_kv_cache_spec", ("vllm_config",)),
    Members(K3, "KimiK3DeltaAttention", (*_PACKED_MEMBERS, "kda_prefill_backend", "use_recoverssm"), LAYER_BASES),
    Parameters(K3_METADATA, "KimiK3KDAMetadataBuilder.build", BUILD_PARAMETERS),
    Derives(K3_METADATA, "KimiK3KDAMetadata", "GDNAttentionMetadata"),
    Derives(GLM, "Glm5NextLinearAttention", "GatedDeltaNetAttention"),
    Parameters(GLM, "Glm5NextLinearAttention.__init__", LAYER_PARAMETERS),
    Parameters(GLM, "Glm5NextLinearAttention._forward", ("qkv_proj_states", "g1", "beta", "core_attn_out")),
    Members(
        GLM,
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
    Members(K3_ROCM, "KimiK3DeltaAttention", ("__init__",)),
    Text(KIMI, "KimiGatedDeltaNetAttention.forward", "7d5d17d60326ab29"),
    Text(KIMI, "KimiGatedDeltaNetAttention._forward", "d25aaa0071758e7d"),
    Text(K3, "KimiK3DeltaAttention.forward", "fae2461df2b9f0f0"),
    Text(K3, "KimiK3DeltaAttention.get_kv_cache_spec", "f4fa10e3abb57df1"),
    Text(GLM, "Glm5NextLinearAttention.forward", "cdc80be9d1b847cd"),
    Text(K3, "resolve_kda_prefill_backend", "c68dff20acedb829"),
    Text(GLM, "_resolve_kda_prefill_backend", "f520ce2dca93d333"),
    Text(K3_DECODE, "fused_recurrent_kda_fwd_kernel", "c31adf137cf96562"),
    Text(K3_DECODE, "fused_recurrent_kda_packed_decode_kernel", "b0d67979cf7a8d02"),
    Text(MAMBA_UTILS, "MambaStateShapeCalculator.kda_state_shape", "5c14c54b4939298c"),
)

_CHECKPOINT_FACTS: tuple[Fact, ...] = (
    Members(GDN, "GDNAttentionMetadata", ("checkpoint",)),
    Members(CHECKPOINT, "MambaPrefillCheckpointMetadata", ("offsets",)),
    Parameters(GLM, "Glm5NextLinearAttention.get_kv_cache_spec", ("vllm_config",)),
    Text(K3_METADATA, "KimiK3KDAMetadataBuilder.build", "5e95555a5198aba6"),
    Text(GLM, "Glm5NextLinearAttention._forward", "55a7de07c1255b36"),
    Text(GLM, "Glm5NextLinearAttention.get_kv_cache_spec", "f4fa10e3abb57df1"),
    Text(GLM_DECODE, "fused_recurrent_gated_delta_rule_fwd_kernel", "89a106a71e48894b"),
)

VLLM_0_31 = Seam(
    versions=("0.31.0",),
    layers=tuple(replace(layer, checkpoints=layer.module != GLM) for layer in _PACKED_LAYERS),
    builders=_PACKED_BUILDERS,
    refused=_PACKED_REFUSED,
    facts=(
        *_PACKED_FACTS,
        Text(GLM, "Glm5NextLinearAttention._forward", "9072f5b74c20eb4d"),
        Text(GLM_DECODE, "fused_recurrent_gated_delta_rule_fwd_kernel", "7b2f15893d768942"),
        Text(K3, "KimiK3DeltaAttention._forward", "1be63fc8b9c33557"),
        Text(CONV, "_causal_conv1d_fwd_kernel", "68fa66314a7c7f46"),
        Text(CONV, "_causal_conv1d_update_kernel", "93dbf3a6bc888cc1"),
        Text(GDN, "GDNAttentionMetadataBuilder.build", "740cf341d3f3fd57"),
        Text(K3_METADATA, "KimiK3KDAMetadataBuilder.build", "1d181c2be33dcce9"),
        Text(CHECKPOINT, "MambaPrefillCheckpointBuilder.build", "4a730c2e44eef300"),
        Text(
            "vllm.model_executor.layers.mamba.kda_checkpoint", "FlashKDAPrefillCheckpointExporter", "9d57e51e22eaaeaa"
        ),
    ),
)

VLLM_0_32 = Seam(
    versions=("0.32.0",),
    layers=_PACKED_LAYERS,
    builders=_PACKED_BUILDERS,
    refused=_PACKED_REFUSED,
    facts=(
        *_PACKED_FACTS,
        *_CHECKPOINT_FACTS,
        Text(K3, "KimiK3DeltaAttention._forward", "4c1777963bec45ab"),
        Text(CONV, "_causal_conv1d_fwd_kernel", "68fa66314a7c7f46"),
        Text(CONV, "_causal_conv1d_update_kernel", "93dbf3a6bc888cc1"),
        Text(GDN, "GDNAttentionMetadataBuilder.build", "0a0708c7775763c5"),
        Text(CHECKPOINT, "MambaPrefillCheckpointBuilder.build", "8e0d37547d880583"),
        Text(
            "vllm.model_executor.layers.mamba.kda_checkpoint", "FlashKDAPrefillCheckpointExporter", "9d57e51e22eaaeaa"
        ),
    ),
)

VLLM_0_33 = Seam(
    versions=("0.33.0",),
    layers=_PACKED_LAYERS,
    builders=_PACKED_BUILDERS,
    refused=_PACKED_REFUSED,
    facts=(
        *_PACKED_FACTS,
        *_CHECKPOINT_FACTS,
        Text(K3, "KimiK3DeltaAttention._forward", "f3430c6af51fea86"),
        Text(CONV, "_causal_conv1d_fwd_kernel", "a9a65bef22e49126"),
        Text(CONV, "_causal_conv1d_update_kernel", "109fca83e834d0fc"),
        Text(GDN, "GDNAttentionMetadataBuilder.build", "7b991485fd89f4ff"),
        Text(CHECKPOINT, "MambaPrefillCheckpointBuilder.build", "ed30f0355b46b49e"),
        Text(CHECKPOINT, "MambaPrefillCheckpointExporter.export", "9799575573896df9"),
        Text(CHECKPOINT, "store_cache_checkpoints_kernel", "b2962cc09cb385bf"),
    ),
)

SEAMS: dict[str, Seam] = {
    version: seam for seam in (VLLM_0_25, VLLM_0_31, VLLM_0_32, VLLM_0_33) for version in seam.versions
}
