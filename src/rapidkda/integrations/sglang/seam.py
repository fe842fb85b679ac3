"""The place where the plugin meets SGLang, as data: what its sources must say.

The dispatcher of KDA kernels holds one object a phase and calls its `extend` for prefill. The state pool is
[slots, HV, V, K] (V-first) and is updated in place, by slot; new requests find their slot zeroed.
"""

from __future__ import annotations

from ..contract import Accepts, Fact, Imports, Members, Parameters, Text

SUPPORTED_VERSIONS = ("0.5.23",)

CHOICES = "sglang.srt.arg_groups.choices"
BACKEND = "sglang.srt.layers.attention.linear.kda_backend"
UTILS = "sglang.srt.layers.attention.linear.utils"
KERNEL = "sglang.srt.layers.attention.linear.kernels.kernel_backend"
TRITON_KERNEL = "sglang.srt.layers.attention.linear.kernels.kda_triton"

# What the backend hands to a kernel's `extend`, beside q, k, v, g and beta.
EXTEND_KEYWORDS = (
    "ssm_states",
    "cache_indices",
    "query_start_loc",
    "A_log",
    "dt_bias",
    "lower_bound",
    "beta_is_raw",
    "return_intermediate_states",
)

FACTS: tuple[Fact, ...] = (
    Imports(CHOICES, ("LINEAR_ATTN_KERNEL_BACKEND_CHOICES", "add_linear_attn_kernel_backend_choices")),
    Members(UTILS, "LinearAttnKernelBackend", ("TRITON", "CUSTOM", "is_custom", "_missing_")),
    Imports(UTILS, ("get_exec",)),
    Parameters(BACKEND, "KDAKernelDispatcher.__init__", ("decode_backend", "prefill_backend", "verify_backend")),
    Members(BACKEND, "KDAKernelDispatcher", ("extend_kernel", "triton_kernel", "prefill_backend")),
    Members(
        KERNEL,
        "LinearAttnKernelBase",
        ("uses_state_checkpoints", "supports_track_state_snapshot", "supports_fused_chain_verify"),
    ),
    Accepts(TRITON_KERNEL, "TritonKDAKernel.extend", ("q", "k", "v", "g", "beta"), EXTEND_KEYWORDS),
    Text(UTILS, "LinearAttnKernelBackend", "d4adec0e4aeffa7c"),
    Text(UTILS, "resolve_linear_attn_backends", "6ac30e68394bfb80"),
    Text(BACKEND, "KDAKernelDispatcher.__init__", "5db41c8a3ff0d706"),
    Text(BACKEND, "KDAKernelDispatcher.effective_extend_kernel", "628521381517b763"),
    Text(BACKEND, "KDAKernelDispatcher.extend", "190266310862fa75"),
    Text(BACKEND, "KDAAttnBackend.forward_extend", "7c3138512f6ebf32"),
    Text(TRITON_KERNEL, "TritonKDAKernel.extend", "e109fb9aff36cb32"),
)
