from .scheduler import SchedulerConfig
from .vllm import VllmConfig

__all__ = ["SchedulerConfig", "VllmConfig"]
