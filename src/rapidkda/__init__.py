"""rapidkda: Kimi Delta Attention (KDA) for serving.

One front door a job (`rapidkda.ops`), one float64 ground truth (`rapidkda.reference`), and backends that differ in
speed only. Importing rapidkda loads no backend.
"""

from .backends.base import Request
from .dispatch import Choice
from .errors import BackendUnavailable, CompilationError, ConfigConflict
from .ops import (
    causal_conv,
    chunk_kda,
    commit,
    decode,
    fused_recurrent_kda,
    gated_rms_norm,
    prefill,
    prefill_layer,
    resolve_kda_prefill_backend,
    verify,
    workspace_bytes,
)
from .problem import Sizes
from .segments import Checkpoints, Segments

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "Checkpoints",
    "Choice",
    "CompilationError",
    "ConfigConflict",
    "Request",
    "Segments",
    "Sizes",
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
