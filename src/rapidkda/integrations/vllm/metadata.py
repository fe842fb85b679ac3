"""Segment tables of a step, from vLLM's attention metadata, built once a step and shared by the layers of a group.

vLLM's metadata splits a step's requests into speculative ones (verified) and all others (prefill chunks, and plain
decodes of steps that also prefill). It describes each group as if its tokens were packed one after another; in the
step's token axis they are interleaved. The tables here point into the step's axis, so nothing is gathered.

The metadata itself holds device tensors only. Its builder, however, sees the lengths on the host: `host_lengths` keeps
them beside the metadata, so that no length is ever copied back from the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...segments import Checkpoints, Segments

HOST = "_rapidkda_host"
TABLES = "_rapidkda_tables"

HostTable = tuple[np.ndarray, np.ndarray]  # first token, length: int64 [N]


@dataclass(frozen=True, slots=True, eq=False)
class HostTables:
    """What the metadata builder knew on the host: the segments of both groups in the step's token axis."""

    prefill: HostTable
    verify: HostTable


@dataclass(frozen=True, slots=True, eq=False)
class StepTables:
    """One step of one cache group.

    Attributes:
        prefill: the requests that are not verified, in the order of `non_spec_state_indices_tensor`.
        verify: the verified requests, in the order of `spec_state_indices_tensor`; None if there are none.
        checkpoints: states to export during the prefill; None if there are none.
    """

    prefill: Segments
    verify: Segments | None
    checkpoints: Checkpoints | None


def host_lengths(metadata: Any, query_start_loc_cpu: Tensor, num_draft_tokens_cpu: Tensor | None) -> HostTables | None:
    """The step's segments on the host, or None when the builder's split cannot be told from its inputs.

    Args:
        metadata: what the builder made of the inputs.
        query_start_loc_cpu: [R+1], the first token of each request of the step.
        num_draft_tokens_cpu: [R], drafts of each request, -1 for a request that is not verified; None without
            speculation.
    """
    starts = query_start_loc_cpu.numpy().astype(np.int64)
    first, length = starts[:-1], np.diff(starts)
    count = metadata.non_spec_query_start_loc.shape[0] - 1
    if metadata.num_spec_decodes == 0:
        none = np.zeros(0, np.int64)
        return HostTables((first, length), (none, none)) if len(first) == count else None
    if num_draft_tokens_cpu is None:
        return None
    verified = num_draft_tokens_cpu.numpy() >= 0
    # Builders differ in whether requests without tokens stay in the other group. The verified ones are always a
    # superset of those with drafts, so equal counts mean equal sets.
    first = np.where(length > 0, first, 0)  # as on the device, see _segments
    for others in (~verified, ~verified & (length > 0)):
        if np.count_nonzero(verified) == metadata.num_spec_decodes and np.count_nonzero(others) == count:
            return HostTables((first[others], length[others]), (first[verified], length[verified]))
    return None


def tables(metadata: Any) -> StepTables:
    """The tables of a step with at least one prefill, from the cache on `metadata` or built now."""
    found: StepTables | None = getattr(metadata, TABLES, None)
    if found is None:
        found = _build(metadata, getattr(metadata, HOST, None))
        setattr(metadata, TABLES, found)
    return found


def _build(metadata: Any, host: HostTables | None) -> StepTables:
    speculative = metadata.num_spec_decodes > 0
    prefill = _segments(
        metadata.non_spec_query_start_loc,
        metadata.non_spec_token_indx if speculative else None,
        metadata.num_prefill_tokens + metadata.num_decode_tokens,
        host.prefill if host else None,
    )
    verify = None
    if speculative:
        verify = _segments(
            metadata.spec_query_start_loc[: metadata.num_spec_decodes + 1],
            metadata.spec_token_indx,
            metadata.spec_state_indices_tensor.shape[1],
            host.verify if host else None,
        )
    return StepTables(prefill, verify, _checkpoints(getattr(metadata, "checkpoint", None), prefill.count))


def _segments(starts: Tensor, token_index: Tensor | None, longest: int, host: HostTable | None) -> Segments:
    """Segments of a group.

    Args:
        starts: [N+1], cumulative lengths within the group.
        token_index: [tokens of the group], each token's place in the step; None when the group is the whole step.
        longest: bound of the lengths, used when the host does not know them.
    """
    first, length = starts[:-1], starts.diff()
    if token_index is not None:
        # A request without tokens has no place in the step, and at the end would start past the index: it starts at 0.
        place = token_index[first.clamp(max=token_index.shape[0] - 1).long()]
        first = torch.where(length > 0, place, 0)
    if host is not None:
        longest = int(host[1].max(initial=0))
    return Segments(first.to(torch.int32), length.to(torch.int32), longest, host)


def _checkpoints(checkpoint: Any, count: int) -> Checkpoints | None:
    """vLLM has at most one checkpoint a request: an offset a row (0: none) and the state slot that receives it."""
    if checkpoint is None:
        return None
    offsets = getattr(checkpoint, "offsets", None)
    if offsets is None:  # until 0.31 the host keeps none; read once a step, and only in steps that export
        offsets = checkpoint.checkpoint_offsets.tolist()
    offset = np.asarray(offsets, np.int64)[:count]
    rows = np.flatnonzero(offset)
    begin = np.concatenate([np.zeros(1, np.int64), np.cumsum(offset > 0)])
    device = checkpoint.state_indices.device
    packed = torch.from_numpy(np.concatenate([begin, offset[rows], rows]).astype(np.int32))
    if device.type == "cuda":
        packed = packed.pin_memory()
    begin_d, offset_d, rows_d = packed.to(device, non_blocking=True).split([count + 1, len(rows), len(rows)])
    slot = checkpoint.state_indices.index_select(0, rows_d).to(torch.int32)
    return Checkpoints(begin_d, offset_d, slot)
