from enum import Enum
from types import SimpleNamespace

configuration = SimpleNamespace(mamba=SimpleNamespace(linear_attn_prefill_backend=None))


def get_exec():
    return configuration


class LinearAttnKernelBackend(Enum):
    TRITON = "triton"
    FLASHKDA = "flashkda"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value):
        return cls.CUSTOM

    def is_custom(self):
        return self == LinearAttnKernelBackend.CUSTOM
