from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder


@dataclass
class KDACheckpointMetadata:
    checkpoint_offsets: Tensor
    state_indices: Tensor


@dataclass
class KimiK3KDAMetadata(GDNAttentionMetadata):
    spec_token_start: int | None = None


class KimiK3KDAMetadataBuilder(GDNAttentionMetadataBuilder):
    metadata_cls = KimiK3KDAMetadata

    def build(
        self,
        common_prefix_len,
        common_attn_metadata,
        num_accepted_tokens=None,
        num_decode_draft_tokens_cpu=None,
        fast_build=False,
    ):
        # Not through super(): vLLM's builder of Kimi-K3 does not call the one that it derives from.
        build = GDNAttentionMetadataBuilder.build
        build = getattr(build, "__wrapped__", build)
        return build(self, common_prefix_len, common_attn_metadata, num_accepted_tokens, num_decode_draft_tokens_cpu)

    def others(self, spec, lengths):
        return ~spec & (lengths > 0) if bool(spec.any()) else ~spec

    def extra(self, common, others):
        if self.checkpoints is None:
            return {}
        return {
            "checkpoint": KDACheckpointMetadata(*(torch.tensor(x, dtype=torch.int32)[others] for x in self.checkpoints))
        }
