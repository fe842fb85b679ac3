"""flash-linear-attention: run its KDA operators, and so its layers, with rapidkda in inference.

    import rapidkda.integrations.fla as fla_integration
    fla_integration.enable()     # chunk_kda and fused_recurrent_kda of fla now prefer rapidkda
    fla_integration.disable()    # as before

Importing this package does not import fla.
"""

from .registry import SUPPORTED_VERSIONS, disable, enable, enabled

__all__ = ["SUPPORTED_VERSIONS", "disable", "enable", "enabled"]
