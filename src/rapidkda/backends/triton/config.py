"""Tile shapes and launch options per architecture. Measured on an H200; elsewhere what fits, on the safe side."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from ...device import Device
from ..base import Request
from .plan import CHUNK

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
_GLUON = triton.__version__.startswith("3.6.")  # the version that it was written for; the language is experimental
_SCRATCH = 24 << 10  # layout conversions, beside the pipelined tiles
# The most that verification by replay in Gluon takes
REPLAY_TOKENS = 8  # of a request
REPLAY_RECORDS = 32  # of a slot


@dataclass(frozen=True)
class Config:
    """Compile-time choices of a prefill."""

    value_block: int  # value rows of a scan program
    slice: int  # channels that the preparation takes at a time
    prepare_warps: int
    prepare_registers: int | None  # most of a thread: fewer let more programs run side by side
    scan_warps: int
    scan_registers: int | None  # the same of the scan: three programs of it in Gluon fit a multiprocessor
    gluon: bool  # preparation and scan in Gluon, where strides and addresses allow
    stages: int
    precision: str  # of float32 products


@dataclass(frozen=True)
class Machine:
    """What the choice depends on."""

    vendor: str
    shared: int  # bytes a program can have
    units: int  # multiprocessors or compute units
    precision: str
    gluon: bool = False  # can it run the kernels that are written in Gluon?
    overlap: bool = False  # can a kernel start while the one before it ends?

    @staticmethod
    def of(device: Device, units: int) -> Machine:
        if device.vendor == "nvidia":
            shared = _SHARED.get(device.capability or (0, 0), _LEAST_NVIDIA)
            capability = device.capability or (0, 0)
            return Machine(
                device.vendor, shared, units, "tf32x3", capability == (9, 0) and _GLUON, overlap=capability >= (9, 0)
            )
        return Machine(device.vendor, _SHARED.get(device.arch or "", _LEAST_AMD), units, "ieee")


@functools.cache
def machine(device: torch.device) -> Machine:
    """The machine behind a torch device; a CPU stands for the interpreter."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return Machine.of(Device.of(device), units)


def replays(
    where: Machine, dtype: torch.dtype, key_dim: int, value_dim: int, state_v_first: bool, records: int | None
) -> bool:
    """Whether verification by replay has a kernel in Gluon for such tokens, states and records of a slot."""
    return (
        where.gluon
        and dtype in (torch.bfloat16, torch.float16)
        and (key_dim, value_dim) == (128, 128)
        and state_v_first
        and (records or 0) <= REPLAY_RECORDS
    )


def leads(request: Request) -> bool:
    """Whether that kernel serves a request, as far as is known."""
    if request.op != "verify" or request.rollback != "replay":
        return False
    longest = request.records or 0  # tokens of a request fit the records in any case
    if request.deferred:
        longest = min(longest, request.most_tokens or 0)
    return longest <= REPLAY_TOKENS and replays(
        Machine.of(request.device, 1),
        request.dtype,
        request.key_dim,
        request.value_dim,
        request.state_v_first,
        request.records,
    )


@functools.lru_cache(maxsize=256)
def choose(where: Machine, key_dim: int, value_dim: int, precise: bool, bounded: bool) -> Config:
    """The configuration of a call: as deep a pipeline of tiles, up to three, as shared memory holds."""
    block = 32 if precise and key_dim > 128 else 64  # float32 states are operands in shared memory
    tile = (4 if precise else 2) * CHUNK * ((3 if precise else 4) * key_dim + block + 8 * CHUNK)
    stages = 3
    while stages > 1 and stages * tile + _SCRATCH > where.shared:
        stages -= 1
    gluon = where.gluon and not precise and key_dim == 128
    large = precise or key_dim > 128
    registers = 128 if bounded else 168  # what redoes rows of unbounded gates takes more
    return Config(
        value_block=block,
        slice=64 if large else 32,
        prepare_warps=4 if large else 1,
        prepare_registers=None if large or where.vendor != "nvidia" else registers,
        scan_warps=4,
        scan_registers=168 if gluon else None,
        gluon=gluon,
        stages=4 if gluon else stages,
        precision=where.precision,
    )
