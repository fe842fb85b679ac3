"""The Triton backend: every serving operator on NVIDIA (sm_80 and later) and AMD (CDNA 3 and 4) GPUs.

Importing this package loads neither triton nor a kernel, so that any machine can be asked what it lacks.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from typing import Any

import torch

from ... import env
from ...problem import CommitCall, ConvCall, DecodeCall, NormCall, Op, PrefillCall, Sizes, VerifyCall
from ..base import Request

MIN_VERSION = (3, 6)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
AMD_ARCHS = ("gfx942", "gfx950")


class TritonBackend:
    """Portable GPU kernels. On a CPU it runs only under Triton's interpreter (TRITON_INTERPRET=1)."""

    name = "triton"

    def unmet(self, request: Request) -> list[str]:
        reasons = _unmet_machine(request)
        if request.dtype not in DTYPES:
            reasons.append(f"inputs must be bfloat16, float16 or float32, got {_name(request.dtype)}")
        if request.requires_grad:
            reasons.append("it has no gradients")
        if request.op in ("prefill", "decode", "verify"):
            for what, dim in (("key", request.key_dim), ("value", request.value_dim)):
                if dim not in HEAD_DIMS:
                    reasons.append(f"{what} dim must be 64, 128 or 256, got {dim}")
            if request.state_dtype not in STATE_DTYPES:
                reasons.append(f"states must be float32 or bfloat16, got {_name(request.state_dtype)}")
        return reasons

    def leads(self, request: Request) -> bool:
        """See `rapidkda.backends.base.LeadingBackend`: verification by replay, where it has a kernel in Gluon."""
        return request.op == "verify" and not self.unmet(request) and bool(_module("config").leads(request))

    def workspace_bytes(self, op: Op, sizes: Sizes) -> int:
        if op != "prefill":
            return 0
        return int(_module("plan").workspace_bytes(sizes))

    def prefill(self, call: PrefillCall) -> None:
        _module("prefill").prefill(call)

    def decode(self, call: DecodeCall) -> None:
        _module("recurrent").decode(call)

    def verify(self, call: VerifyCall) -> None:
        _module("recurrent").verify(call)

    def commit(self, call: CommitCall) -> None:
        _module("recurrent").commit(call)

    def conv(self, call: ConvCall) -> None:
        _module("conv").conv(call)

    def norm(self, call: NormCall) -> None:
        _module("norm").norm(call)


@functools.cache
def _module(name: str) -> Any:
    """A module of this package; an import statement takes half a microsecond each time it is passed."""
    return importlib.import_module(f".{name}", __name__)


def _unmet_machine(request: Request) -> list[str]:
    """What the machine lacks: the compiler, or a device that it has kernels for."""
    reasons = []
    version = _triton_version()
    if version is None:
        reasons.append("the package triton is not installed")
    elif version < MIN_VERSION:
        reasons.append(f"triton must be {'.'.join(map(str, MIN_VERSION))} or later, got {'.'.join(map(str, version))}")
    device = request.device
    if device.vendor == "nvidia":
        if device.capability is None or device.capability < (8, 0):
            reasons.append(f"it needs compute capability 8.0 or later, got {device}")
    elif device.vendor == "amd":
        if device.arch not in AMD_ARCHS:
            reasons.append(f"it needs one of {', '.join(AMD_ARCHS)}, got {device}")
    elif device.vendor != "cpu" or not env.flag("TRITON_INTERPRET"):
        reasons.append(f"it needs an NVIDIA or AMD GPU, got {device}")
    return reasons


def _triton_version() -> tuple[int, ...] | None:
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        text = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # some builds carry another distribution name
        return MIN_VERSION
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
