from dataclasses import dataclass
from typing import Any


@dataclass
class ForwardContext:
    attn_metadata: Any = None


current = ForwardContext()


def get_forward_context() -> ForwardContext:
    return current
