"""The front door: one function a job. Each checks its arguments, chooses a backend and runs it.

`chunk_kda` and `fused_recurrent_kda` have the signatures that users of flash-linear-attention 0.6 know. `prefill`,
`decode`, `verify`, `commit`, `causal_conv` and `gated_rms_norm` are the serving forms: they read a segment table on the
step's token axis, take strided inputs, and update pools in place.

Every function raises ValueError or TypeError for a bad argument (naming it, what it got and what it takes) before
anything is written, and `BackendUnavailable` when the backend asked for cannot run.
"""

from __future__ import annotations

from .dispatch import resolve_kda_prefill_backend
