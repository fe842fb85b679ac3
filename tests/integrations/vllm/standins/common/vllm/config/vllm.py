from dataclasses import dataclass, field
from typing import Any

from .scheduler import SchedulerConfig


@dataclass
class VllmConfig:
    model_config: Any = None
    additional_config: Any = field(default_factory=dict)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        self.checked = True
