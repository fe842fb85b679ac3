"""What a backend may ask about the machine, as a plain value, so that tests can simulate any of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

Vendor = Literal["cpu", "nvidia", "amd", "other"]


@dataclass(frozen=True)
class Device:
    """One device. `capability` is CUDA's (major, minor); `arch` is AMD's gfx name; both None elsewhere."""

    vendor: Vendor
    name: str
    capability: tuple[int, int] | None = None
    arch: str | None = None

    @staticmethod
    def of(device: torch.device) -> Device:
        """Describe a torch device. Cheap after the first call for each device."""
        return _describe(device.type, device.index)

    def __str__(self) -> str:
        detail = f"compute capability {self.capability[0]}.{self.capability[1]}" if self.capability else self.arch
        return f"{self.name} ({detail})" if detail else self.name


CPU = Device("cpu", "CPU")


@functools.cache
def _describe(kind: str, index: int | None) -> Device:
    if kind == "cpu":
        return CPU
    if kind != "cuda":
        return Device("other", kind)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    if torch.version.hip is not None:
        return Device("amd", properties.name, arch=properties.gcnArchName.split(":")[0])
    return Device("nvidia", properties.name, capability=(properties.major, properties.minor))
