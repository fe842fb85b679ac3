"""Buffers that blocks of a call use one after another.

Fresh memory costs a page fault for every 4 KiB, several times what an operation on it costs, and none of it is in a
cache. Autograd needs fresh tensors, so a scratch may also be off: it then hands out None, which every `out=` accepts.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Named buffers of one dtype on one device; a name's memory is overwritten when it is taken again."""

    def __init__(self, dtype: torch.dtype, device: torch.device, reuse: bool):
        self.dtype = dtype
        self.device = device
        self.reuse = reuse
        self._buffers: dict[str, Tensor] = {}

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Uninitialised memory, whether the scratch is on or off."""
        numel = 1
        for extent in shape:
            numel *= extent
        flat = self._buffers.get(name)
        if flat is None or flat.numel() < numel:
            flat = torch.empty(numel, dtype=self.dtype, device=self.device)
            if self.reuse:
                self._buffers[name] = flat
        return flat[:numel].view(shape)

    def out(self, name: str, *shape: int) -> Tensor | None:
        """A target for `out=`: None when the scratch is off."""
        return self.buffer(name, *shape) if self.reuse else None

    def convert(self, name: str, x: Tensor) -> Tensor:
        """x in the scratch's dtype; a dense copy when the scratch is on, else whatever costs least."""
        return self.buffer(name, *x.shape).copy_(x) if self.reuse else x.to(self.dtype)
