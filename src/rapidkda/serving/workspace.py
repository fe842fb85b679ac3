"""Scratch of the KDA layers: planned once, reported to the byte, shared by all layers, one piece a concurrent lane."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import checks
from ..dispatch import Choice
from ..problem import Sizes
from .config import StateShape, StepLimits

ALIGNMENT = 256


class Workspace:
    """The buffers of a step: convolution output [T, C], KDA output [T, HV * V] and the prefill backend's scratch.

    Args:
        shape: heads and head dims of the layers on this rank.
        limits: the largest step.
        prefill: the prefill backend of the layers (`KDALayer.choices["prefill"]`).
        dtype: of the activations.
        device: where the buffers live.
        lanes: steps that may run at once, each with buffers of its own.
    """

    def __init__(
        self,
        shape: StateShape,
        limits: StepLimits,
        prefill: Choice,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        lanes: int = 1,
    ):
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device(device)
        self.prefill = prefill
        self.locked = False
        self._lanes = checks.integer("lanes", lanes, 1)
        self._allocate(limits)

    @staticmethod
    def plan_bytes(
        shape: StateShape,
        limits: StepLimits,
        prefill: Choice,
        *,
        dtype: torch.dtype = torch.bfloat16,
        lanes: int = 1,
    ) -> int:
        """Bytes that a workspace of these arguments allocates, exactly."""
        return lanes * (sum(_parts(shape, limits, prefill, dtype)) + ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def lock(self) -> None:
        """From now on the workspace never grows."""
        self.locked = True

    def reserve(self, limits: StepLimits) -> None:
        """Grow to hold steps of `limits` too. Raises ValueError when locked and they do not fit already."""
        if limits.max_tokens <= self.max_tokens and limits.max_prefills <= self.max_prefills:
            return
        if self.locked:
            raise ValueError(
                f"limits must fit the locked workspace of {self.max_tokens} tokens and {self.max_prefills} prefills, "
                f"got {limits.max_tokens} and {limits.max_prefills}"
            )
        self._allocate(
            StepLimits(
                max_tokens=max(limits.max_tokens, self.max_tokens),
                max_requests=max(limits.max_requests, self.max_prefills),
                max_prefills=max(limits.max_prefills, self.max_prefills),
            )
        )

    def check(self, num_tokens: int, prefills: int, lane: int) -> None:
        """Raise ValueError, naming both numbers, unless the step fits."""
        if num_tokens > self.max_tokens:
            raise ValueError(f"step must fit the workspace of {self.max_tokens} tokens, got {num_tokens}")
        if prefills > self.max_prefills:
            raise ValueError(f"step must fit the workspace of {self.max_prefills} prefills, got {prefills}")
        if not 0 <= lane < self._lanes:
            raise ValueError(f"lane must be in 0..{self._lanes - 1}, got {lane}")

    def conv_output(self, num_tokens: int, lane: int = 0) -> Tensor:
        """[T, C]"""
        return self._views[lane][0][:num_tokens]

    def core_output(self, num_tokens: int, lane: int = 0) -> Tensor:
        """[T, HV, V]"""
        return self._views[lane][1][:num_tokens]

    def scratch(self, lane: int = 0) -> Tensor:
        """uint8, 256-byte aligned, for the prefill backend."""
        return self._views[lane][2]

    def fill(self, value: int) -> None:
        """Set every byte (tests poison with 255, which reads as NaN)."""
        for buffer in self._buffers:
            buffer.fill_(value)

    def _allocate(self, limits: StepLimits) -> None:
        self.max_tokens = limits.max_tokens
        self.max_prefills = limits.max_prefills
        parts = _parts(self.shape, limits, self.prefill, self.dtype)
        self._buffers = [
            torch.empty(sum(parts) + ALIGNMENT, dtype=torch.uint8, device=self.device) for _ in range(self._lanes)
        ]
        self._views = [self._carve(buffer, parts) for buffer in self._buffers]

    def _carve(self, buffer: Tensor, parts: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
        start = -buffer.data_ptr() % ALIGNMENT
        conv, core, scratch = buffer[start : start + sum(parts)].split(parts)
        shape = self.shape
        conv_extents = (self.max_tokens, shape.conv_channels)
        core_extents = (self.max_tokens, shape.value_heads, shape.value_dim)
        conv_elements, core_elements = math.prod(conv_extents), math.prod(core_extents)
        return (
            conv.view(self.dtype)[:conv_elements].view(conv_extents),
            core.view(self.dtype)[:core_elements].view(core_extents),
            scratch,
        )


def _parts(shape: StateShape, limits: StepLimits, prefill: Choice, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes of the convolution output, the KDA output and the scratch, each rounded up to the alignment."""
    needed = prefill.backend.workspace_bytes(
        "prefill",
        Sizes(
            tokens=limits.max_tokens,
            segments=limits.max_prefills,
            heads=shape.heads,
            value_heads=shape.value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            dtype=dtype,
        ),
    )
    conv = limits.max_tokens * shape.conv_channels * dtype.itemsize
    core = limits.max_tokens * shape.value_heads * shape.value_dim * dtype.itemsize
    rounded = [-(-size // ALIGNMENT) * ALIGNMENT for size in (conv, core, needed)]
    return rounded[0], rounded[1], rounded[2]
