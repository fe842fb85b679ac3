"""Tile shapes and launch options per architecture. Values measured on an H200; elsewhere what fits, on the safe side."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ...device import Device

# Shared memory of a program, bytes. What is not listed gets the least of them.
_SHARED = {
    (8, 0): 163 << 10,
    (8, 7): 163 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
_LEAST_NVIDIA = 99 << 10
_LEAST_AMD = 64 << 10
_SCRATCH = 24 << 10  # layout conversions, beside the pipelined tiles


@dataclass(frozen=True)
class Config:
    """Compile-time choices of a prefill."""

    chunk: int  # tokens of a tile
    value_block: int  # value rows of a scan program
    prepare_warps: int
    prepare_registers: int | None  # most registers a thread of the preparation may take
    scan_warps: int
    stages: int
    precision: str  # of float32 products


@dataclass(frozen=True)
class Machine:
    """What the choice depends on."""

    shared: int  # bytes a program can have
    units: int  # multiprocessors or compute units
    precision: str

    @staticmethod
    def of(device: Device, units: int) -> Machine:
        if device.vendor == "nvidia":
            shared = _SHARED.get(device.capability or (0, 0), _LEAST_NVIDIA)
            return Machine(shared, units, "tf32x3")
        return Machine(_SHARED.get(device.arch or "", _LEAST_AMD), units, "ieee")


@functools.cache
def machine(device: torch.device) -> Machine:
    """The machine behind a torch device; a CPU stands for the interpreter."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return Machine.of(Device.of(device), units)


@functools.lru_cache(maxsize=256)
def choose(where: Machine, key_dim: int, value_dim: int, precise: bool, chunk_limit: int, full: bool) -> Config:
    """The configuration of a call.

    Args:
        chunk_limit: largest chunk that the call allows (16 where states must be exported every 16 tokens).
        full: enough programs to fill the machine with wide value blocks.
    """
    size = 4 if precise else 2
    chunk = min(chunk_limit, 16 if precise else 32)
    block = min(value_dim, 64)
    warps = 4
    stages = 3
    if full and value_dim >= 128 and not precise:
        block, warps = 128, 8

    def tile_bytes() -> int:
        return size * (3 * chunk * key_dim + chunk * block + chunk * chunk)

    while stages > 1 and (stages * tile_bytes()) + _SCRATCH > where.shared:
        stages -= 1
    if stages == 1 and chunk > 16:
        chunk, stages = 16, 2
        while stages > 1 and (stages * tile_bytes()) + _SCRATCH > where.shared:
            stages -= 1
    return Config(chunk, block, 4 if key_dim > 128 or precise else 2, None, warps, stages, where.precision)
