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

from ..contract import Fact, Members, Text
from . import facts
from .facts import CHECKPOINT, CONV, GDN, GLM, GLM_0_30, K3, K3_METADATA, K3_ROCM, KDA_CHECKPOINT, KIMI

Kind = Literal["kimi_separate", "kimi_packed", "glm"]


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


_KIMI = LayerSeam(KIMI, "KimiGatedDeltaNetAttention", "kimi_packed", "Kimi-Linear", eager_break=True, resolver=True)
_K3 = LayerSeam(K3, "KimiK3DeltaAttention", "kimi_packed", "Kimi-K3", True, checkpoints=True, resolver=True)
_GLM = LayerSeam(GLM, "Glm5NextLinearAttention", "glm", "GLM-5.3-Flash", True, checkpoints=True, resolver=True)
_ROCM = RefusedLayer(K3_ROCM, "KimiK3DeltaAttention", "vLLM's ROCm layer of Kimi-K3 has a seam of its own")
_EARLY_K3 = RefusedLayer(K3, "KimiK3DeltaAttention", "rapidkda serves Kimi-K3 from vLLM 0.30.0 on")
_BUILDER = BuilderSeam(GDN, "GDNAttentionMetadataBuilder")
_K3_BUILDER = BuilderSeam(K3_METADATA, "KimiK3KDAMetadataBuilder")

_SEPARATE_SEAM = Seam(
    versions=(),
    layers=(LayerSeam(KIMI, "KimiGatedDeltaNetAttention", "kimi_separate", "Kimi-Linear"),),
    builders=(_BUILDER,),
    refused=(),
    facts=(*facts.COMMON, *facts.KIMI_SEPARATE),
)
_PACKED_SEAM = Seam(
    versions=(),
    layers=(_KIMI,),
    builders=(_BUILDER,),
    refused=(_EARLY_K3, _ROCM),
    facts=(
        *facts.COMMON,
        *facts.KIMI_PACKED,
        Text(KIMI, "KimiGatedDeltaNetAttention.forward", "75cfa21787a7f9a6"),
        Text(CONV, "_causal_conv1d_fwd_kernel", "68fa66314a7c7f46"),
        Text(CONV, "_causal_conv1d_update_kernel", "93dbf3a6bc888cc1"),
    ),
)
_ALL_SEAM = Seam(
    versions=(),
    layers=(_KIMI, _K3, _GLM),
    builders=(replace(_BUILDER, update=True), _K3_BUILDER),
    refused=(_ROCM,),
    facts=(
        *facts.COMMON,
        *facts.KIMI_PACKED,
        *facts.K3_LAYER,
        *facts.glm_layer(GLM),
        *facts.SHARED_CHECKPOINTS,
    ),
)


def _seam(base: Seam, *versions: str, texts: tuple[Fact, ...]) -> Seam:
    return replace(base, versions=versions, facts=(*base.facts, *texts))


_ALL = (
    _seam(
        _SEPARATE_SEAM,
        "0.25.0",
        "0.25.1",
        texts=(
            Text(
                "vllm.model_executor.layers.fla.ops.fused_recurrent",
                "fused_recurrent_gated_delta_rule_fwd_kernel",
                "98fffa42b9a8835d",
            ),
            Text(GDN, "GDNAttentionMetadataBuilder.build", "adfdb58cef9adfe3"),
        ),
    ),
    _seam(
        _SEPARATE_SEAM,
        "0.26.0",
        texts=(
            Text(
                "vllm.third_party.flash_linear_attention.ops.fused_recurrent",
                "fused_recurrent_gated_delta_rule_fwd_kernel",
                "98fffa42b9a8835d",
            ),
            Text(GDN, "GDNAttentionMetadataBuilder.build", "55a156e2ce3895e3"),
        ),
    ),
    _seam(
        replace(_PACKED_SEAM, refused=(_EARLY_K3,)),  # Kimi-K3 on ROCm came with 0.28
        "0.27.0",
        "0.27.1",
        texts=(
            Text(KIMI, "KimiGatedDeltaNetAttention._forward", "97a5e8fc185e39ba"),
            Text(GDN, "GDNAttentionMetadataBuilder.build", "55a156e2ce3895e3"),
        ),
    ),
    _seam(
        _PACKED_SEAM,
        "0.28.0",
        texts=(
            Text(KIMI, "KimiGatedDeltaNetAttention._forward", "a15a813579ca3cb8"),
            Text(GDN, "GDNAttentionMetadataBuilder.build", "e060c8975cb28047"),
        ),
    ),
    _seam(
        _PACKED_SEAM,
        "0.29.0",
        texts=(
            Text(KIMI, "KimiGatedDeltaNetAttention._forward", "d25aaa0071758e7d"),
            Text(GDN, "GDNAttentionMetadataBuilder.build", "1d2918117fe1cb61"),
        ),
    ),
    Seam(
        versions=("0.30.0",),
        layers=(_KIMI, _K3, replace(_GLM, module=GLM_0_30, checkpoints=False)),
        builders=(_BUILDER, _K3_BUILDER),
        refused=(_ROCM,),
        facts=(
            *facts.COMMON,
            *facts.KIMI_PACKED,
            *facts.K3_LAYER,
            *facts.glm_layer(GLM_0_30),
            *facts.GLM_WITHOUT_CHECKPOINTS,
            Members(K3_METADATA, "KDACheckpointMetadata", ("checkpoint_offsets", "state_indices")),
            Text(KIMI, "KimiGatedDeltaNetAttention.forward", "75cfa21787a7f9a6"),
            Text(KIMI, "KimiGatedDeltaNetAttention._forward", "d25aaa0071758e7d"),
            Text(K3, "KimiK3DeltaAttention.forward", "8aad4b236e4b738c"),
            Text(K3, "KimiK3DeltaAttention._forward", "7f140bd1c9550f1a"),
            Text(K3, "KimiK3DeltaAttention.get_kv_cache_spec", "64484db10a76ef7c"),
            Text(K3, "_store_cache_checkpoints_kernel", "955cfa73e344d034"),
            Text(K3_METADATA, "KimiK3KDAMetadataBuilder.build", "48961c4f1cbb2a85"),
            Text(GLM_0_30, "Glm5NextLinearAttention._forward", "9072f5b74c20eb4d"),
            Text(CONV, "_causal_conv1d_fwd_kernel", "68fa66314a7c7f46"),
            Text(CONV, "_causal_conv1d_update_kernel", "93dbf3a6bc888cc1"),
            Text(GDN, "GDNAttentionMetadataBuilder.build", "1d2918117fe1cb61"),
        ),
    ),
    _seam(
        replace(_ALL_SEAM, layers=(_KIMI, _K3, replace(_GLM, checkpoints=False))),
        "0.31.0",
        texts=(
            *facts.GLM_WITHOUT_CHECKPOINTS,
            Text(GLM, "Glm5NextLinearAttention._forward", "9072f5b74c20eb4d"),
            Text(K3, "KimiK3DeltaAttention._forward", "1be63fc8b9c33557"),
            Text(CONV, "_causal_conv1d_fwd_kernel", "68fa66314a7c7f46"),
            Text(CONV, "_causal_conv1d_update_kernel", "93dbf3a6bc888cc1"),
            Text(GDN, "GDNAttentionMetadataBuilder.build", "740cf341d3f3fd57"),
            Text(K3_METADATA, "KimiK3KDAMetadataBuilder.build", "1d181c2be33dcce9"),
            Text(CHECKPOINT, "MambaPrefillCheckpointBuilder.build", "4a730c2e44eef300"),
            Text(KDA_CHECKPOINT, "FlashKDAPrefillCheckpointExporter", "9d57e51e22eaaeaa"),
        ),
    ),
    _seam(
        _ALL_SEAM,
        "0.32.0",
        texts=(
            *facts.GLM_WITH_CHECKPOINTS,
            Text(K3, "KimiK3DeltaAttention._forward", "4c1777963bec45ab"),
            Text(CONV, "_causal_conv1d_fwd_kernel", "68fa66314a7c7f46"),
            Text(CONV, "_causal_conv1d_update_kernel", "93dbf3a6bc888cc1"),
            Text(GDN, "GDNAttentionMetadataBuilder.build", "0a0708c7775763c5"),
            Text(CHECKPOINT, "MambaPrefillCheckpointBuilder.build", "8e0d37547d880583"),
            Text(KDA_CHECKPOINT, "FlashKDAPrefillCheckpointExporter", "9d57e51e22eaaeaa"),
        ),
    ),
    _seam(
        _ALL_SEAM,
        "0.33.0",
        texts=(
            *facts.GLM_WITH_CHECKPOINTS,
            Text(K3, "KimiK3DeltaAttention._forward", "f3430c6af51fea86"),
            Text(CONV, "_causal_conv1d_fwd_kernel", "a9a65bef22e49126"),
            Text(CONV, "_causal_conv1d_update_kernel", "109fca83e834d0fc"),
            Text(GDN, "GDNAttentionMetadataBuilder.build", "7b991485fd89f4ff"),
            Text(CHECKPOINT, "MambaPrefillCheckpointBuilder.build", "ed30f0355b46b49e"),
            Text(CHECKPOINT, "MambaPrefillCheckpointExporter.export", "9799575573896df9"),
            Text(CHECKPOINT, "store_cache_checkpoints_kernel", "b2962cc09cb385bf"),
        ),
    ),
)

SEAMS: dict[str, Seam] = {version: seam for seam in _ALL for version in seam.versions}
