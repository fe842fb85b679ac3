"""Adapter to FlashKDA, the fused CUDA prefill that vLLM ships (`vllm._flashkda_C`) or that stands alone (`flash_kda`).

The extension takes one packed run of dense tensors and states by sequence, so the adapter copies what is strided,
gathers the segments' tokens and states, and scatters the results: that is its cost beside the other backends.
"""

from __future__ import annotations

from .base import Request


class FlashKdaBackend:
    """FlashKDA behind the backend contract. Prefill only."""

    name = "flashkda"
