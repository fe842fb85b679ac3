"""vLLM: run the prefill of the KDA layers of GLM-5.3-Flash, Kimi-Linear and Kimi-K3 with rapidkda.

    RAPIDKDA_VLLM=prefill vllm serve ...
    vllm serve ... --additional-config '{"kda_prefill_backend": "rapidkda"}'

vLLM finds `register` by its entry point. Importing this package does not import vLLM.
"""

from .plugin import UnsupportedVllm, register
from .seams import SEAMS

SUPPORTED_VERSIONS = tuple(SEAMS)

__all__ = ["SUPPORTED_VERSIONS", "UnsupportedVllm", "register"]
