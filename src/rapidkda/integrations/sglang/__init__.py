"""SGLang: run the prefill of KDA layers with rapidkda.

    sglang serve ... --linear-attn-prefill-backend rapidkda

SGLang finds `register` by its entry point. Importing this package does not import SGLang.
"""

from .plugin import UnsupportedSglang, register
from .seam import SUPPORTED_VERSIONS

__all__ = ["SUPPORTED_VERSIONS", "UnsupportedSglang", "register"]
