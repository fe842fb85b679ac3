"""rapidkda as one of SGLang's KDA kernels: its `extend`, and SGLang's own where rapidkda does not serve."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ...segments import Segments

PAD_SLOT = -1  # SGLang's padding slot

log = logging.getLogger("sglang.rapidkda")


class RapidKdaKernel:
    """What SGLang's dispatcher calls for prefill. The attributes are those of its base class of kernels."""

    uses_state_checkpoints = False
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = False
    supports_track_state_snapshot = True  # such steps go to `fallback`, which writes the snapshots

    def __init__(self, fallback: Any):
        self.fallback = fallback
        self._logged: set[str] = set()

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        **options: Any,
    ) -> Any:
        """One prefill step, in place on `ssm_states`.

        Args:
            q, k, v, g: [1, T, H, K], [1, T, H, K], [1, T, HV, V], [1, T, HV, K]; g holds gate logits.
            beta: [1, T, HV], logits with `beta_is_raw`, else probabilities.
            ssm_states: [slots, HV, V, K]. Every request's slot holds its state, zeros for a new one.
            cache_indices: [N], the slot of each request.
            query_start_loc: [N + 1], the first token of each request, and the end.
            options: SGLang's others; `extend_seq_lens_cpu` holds the lengths on the host.

        Returns:
            [1, T, HV, V]; what the fallback returns where it takes the step.
        """
        reason = self._decline(options)
        if reason is not None:
            if reason not in self._logged:
                self._logged.add(reason)
                log.info("KDA prefill steps stay on %s: %s", type(self.fallback).__name__, reason)
            return self.fallback.extend(
                q,
                k,
                v,
                g,
                beta,
                ssm_states=ssm_states,
                cache_indices=cache_indices,
                query_start_loc=query_start_loc,
                **options,
            )
        out: Tensor = ops.prefill(
            q[0],
            k[0],
            v[0],
            g[0],
            beta[0],
            segments=_segments(query_start_loc, options["extend_seq_lens_cpu"]),
            state=ssm_states,
            slots=cache_indices.to(torch.int32),
            pad_slot=PAD_SLOT,
            A_log=options["A_log"],
            dt_bias=options.get("dt_bias"),
            lower_bound=options.get("lower_bound"),
            use_beta_sigmoid_in_kernel=bool(options.get("beta_is_raw")),
        )
        return out[None]

    @staticmethod
    def _decline(options: dict[str, Any]) -> str | None:
        """Why SGLang's own kernel must take a step; None if rapidkda takes it."""
        if options.get("return_intermediate_states"):
            return "its states at chunk boundaries are tracked for the prefix cache"
        if options.get("is_spec_decode"):
            return "it extends drafts and must be possible to roll back"
        if options.get("extend_seq_lens_cpu") is None:
            return "its lengths are not known on the host (prefill in a CUDA graph)"
        if options.get("A_log") is None:
            return "its gate comes activated"
        return None


def _segments(query_start_loc: Tensor, lengths: Sequence[int] | Tensor) -> Segments:
    """The step's requests; all of them, in order, without gaps."""
    length = np.asarray(lengths, np.int64)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])[:-1]
    starts = query_start_loc.to(torch.int32)
    return Segments(starts[:-1], starts.diff(), int(length.max(initial=0)), (first, length))
