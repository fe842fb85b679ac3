"""Compiling what a call launches, for any target, on a machine without a GPU: Triton's compiler needs none."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rapidkda.backends.triton import config
from rapidkda.device import Device


@dataclass(frozen=True)
class Target:
    """One architecture: how Triton names it, how rapidkda sees it, and the shared memory a program can have."""

    gpu: GPUTarget
    device: Device
    shared: int


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), Device("nvidia", "A100", (8, 0)), 163 << 10),
    "sm_89": Target(GPUTarget("cuda", 89, 32), Device("nvidia", "L40S", (8, 9)), 99 << 10),
    "sm_90": Target(GPUTarget("cuda", 90, 32), Device("nvidia", "H200", (9, 0)), 227 << 10),
    "sm_100": Target(GPUTarget("cuda", 100, 32), Device("nvidia", "B200", (10, 0)), 227 << 10),
    "sm_120": Target(GPUTarget("cuda", 120, 32), Device("nvidia", "RTX 5090", (12, 0)), 99 << 10),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), Device("amd", "MI300X", arch="gfx942"), 64 << 10),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), Device("amd", "MI355X", arch="gfx950"), 160 << 10),
}


class _Driver:
    """Stands in for a GPU's driver: it only says what to compile for."""

    def __init__(self, target: GPUTarget, index: int):
        self.target = target
        self.index = index

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling(name: str, units: int = 132) -> Iterator[list[Any]]:
    """Within it, calls on CPU tensors compile their kernels for the target and launch nothing; yields the kernels."""
    target = TARGETS[name]
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))
        return kernels[-1]

    machine = config.Machine.of(target.device, units)
    stand_in = _Driver(target.gpu, 1000 + list(TARGETS).index(name))  # Triton caches by device index
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(config, "machine", return_value=machine),
        mock.patch.object(driver, "_active", stand_in),
    ):
        yield kernels


def stack_bytes(kernel: Any) -> int:
    """What a thread of a kernel for NVIDIA keeps in memory for want of registers."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", report))
