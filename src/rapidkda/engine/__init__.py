"""The embedded engine: continuous batching on one machine for `glm5_next` and `kimi_linear` models of transformers.

    engine = Engine(model, EngineConfig(max_num_seqs=32, max_drafts=3))
    for result in engine.generate(prompts, SamplingParams(max_new_tokens=64)):
        print(result.tokens)

Importing this package does not import transformers.
"""

from .config import EngineConfig
from .drafts import Drafter, Progress, PromptLookup
from .engine import Engine, MemoryReport
from .mtp import MtpDrafter, MtpHead
from .request import Request, RequestResult, RequestStats, TokenEvent
from .sampling import SamplingParams

__all__ = [
    "Drafter",
    "Engine",
    "EngineConfig",
    "MemoryReport",
    "MtpDrafter",
    "MtpHead",
    "Progress",
    "PromptLookup",
    "Request",
    "RequestResult",
    "RequestStats",
    "SamplingParams",
    "TokenEvent",
]
