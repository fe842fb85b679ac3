"""The front door: one function a job. Each checks its arguments, chooses a backend and runs it.

`chunk_kda` and `fused_recurrent_kda` have the signatures that users of flash-linear-attention 0.6 know. `prefill`,
`decode`, `verify`, `commit`, `causal_conv` and `gated_rms_norm` are the serving forms: they read a segment table on the
step's token axis, take strided inputs, and update pools in place; `prefill_layer` is three of them in one.

Every function raises ValueError or TypeError for a bad argument (naming it, what it got and what it takes) before
anything is written, and `BackendUnavailable` when the backend asked for cannot run. `backend` is a name, a `Choice`
made earlier (the hot path: no source is read again), or None for `RAPIDKDA_PREFILL_BACKEND` /
`RAPIDKDA_DECODE_BACKEND` and then `auto`.

Method: Kimi Linear (arXiv 2510.26692); chunked delta rule: Yang et al. (arXiv 2406.06484), gated: arXiv 2412.06464.
"""

from ..dispatch import resolve_kda_prefill_backend
from .choose import workspace_bytes
from .layer import prefill_layer
from .neighbours import causal_conv, gated_rms_norm
from .sequences import chunk_kda, fused_recurrent_kda
from .steps import commit, decode, prefill, verify

__all__ = [
    "causal_conv",
    "chunk_kda",
    "commit",
    "decode",
    "fused_recurrent_kda",
    "gated_rms_norm",
    "prefill",
    "prefill_layer",
    "resolve_kda_prefill_backend",
    "verify",
    "workspace_bytes",
]
