from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointMetadata


@dataclass
class GDNAttentionMetadata:
    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_spec_decodes: int
    num_spec_decode_tokens: int
    num_actual_tokens: int
    has_initial_state: Tensor | None = None
    spec_query_start_loc: Tensor | None = None
    non_spec_query_start_loc: Tensor | None = None
    spec_state_indices_tensor: Tensor | None = None
    non_spec_state_indices_tensor: Tensor | None = None
    spec_token_indx: Tensor | None = None
    non_spec_token_indx: Tensor | None = None
    num_accepted_tokens: Tensor | None = None
    spec_sequence_masks_cpu: Tensor | None = None
    checkpoint: Any = None


class GDNAttentionMetadataBuilder:
    metadata_cls = GDNAttentionMetadata
    checkpoints: tuple[list[int], list[int]] | None = None  # for the tests: offset and slot of each request

    def build(
        self,
        common_prefix_len,
        common_attn_metadata,
        num_accepted_tokens=None,
        num_decode_draft_tokens_cpu=None,
        fast_build=False,
    ):
        """Split the requests into verified ones and all others, each group packed, as vLLM describes them."""
        common = common_attn_metadata
        starts = common.query_start_loc_cpu
        lengths = starts.diff()
        drafts = num_decode_draft_tokens_cpu
        spec = torch.zeros_like(lengths, dtype=torch.bool) if drafts is None else drafts >= 0
        others = self.others(spec, lengths)
        token_is_spec = torch.repeat_interleave(spec, lengths)
        order = torch.argsort(token_is_spec.to(torch.int8), stable=True)
        plain = int((~token_is_spec).sum())
        verified = int(spec.sum())
        prefills = int((lengths[others] > 1).sum()) + int((lengths[others] == 1).sum() if verified else 0)
        decodes = 0 if verified else int((lengths[others] == 1).sum())

        def packed(mask):
            return torch.cat([torch.zeros(1, dtype=torch.int64), lengths[mask].cumsum(0)]).to(torch.int32)

        return self.metadata_cls(
            num_prefills=prefills,
            num_prefill_tokens=plain - decodes,
            num_decodes=decodes,
            num_decode_tokens=decodes,
            num_spec_decodes=verified,
            num_spec_decode_tokens=int(token_is_spec.sum()),
            num_actual_tokens=common.num_actual_tokens,
            has_initial_state=(common.num_computed_tokens > 0)[others] if prefills else None,
            spec_query_start_loc=packed(spec) if verified else None,
            non_spec_query_start_loc=packed(others),
            spec_state_indices_tensor=common.block_table_tensor[spec] if verified else None,
            non_spec_state_indices_tensor=common.block_table_tensor[others, 0],
            spec_token_indx=order[plain:] if verified else None,
            non_spec_token_indx=order[:plain] if verified else None,
            num_accepted_tokens=num_accepted_tokens[spec] if verified else None,
            **self.extra(common, others),
        )

    def others(self, spec, lengths):
        return ~spec

    def extra(self, common, others):
        if self.checkpoints is None:
            return {}
        offsets, slots = (torch.tensor(values, dtype=torch.int32)[others] for values in self.checkpoints)
        return {"checkpoint": MambaPrefillCheckpointMetadata(offsets, slots, offsets=offsets.tolist())}

    def update_block_table(self, metadata, blk_table, slot_mapping):
        return replace(metadata, non_spec_state_indices_tensor=blk_table[:, 0])
