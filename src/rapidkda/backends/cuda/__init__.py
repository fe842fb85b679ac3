"""CUDA C++ kernels for compute capability 9.0, compiled at run time: prefill, verification by replay, commit.
Decode, verification with a slot a position, convolution and norm by themselves are bound by memory and launch, where
the Triton kernels are as fast or faster; a prefill takes the convolution before it and the norm after it on where that
is faster.

Importing this folder needs none of the packages that the kernels are compiled and launched with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import torch

from ...errors import CompilationError
from ...problem import CommitCall, ConvCall, DecodeCall, NormCall, Op, PrefillCall, Sizes, VerifyCall
from ..base import Request

# Scratch is sized for the largest part of this capability (132 multiprocessors on an H100 SXM and an H200).
_MAX_MULTIPROCESSORS = 132
OPERATORS: tuple[Op, ...] = ("prefill", "verify")
_PACKAGES = {"cuda.bindings": "cuda-bindings", "cuda.core": "cuda-core"}


class CudaBackend:
    """Prefill, verification by replay and commit on Hopper."""

    name = "cuda"

    def unmet(self, request: Request) -> list[str]:
        """See `rapidkda.backends.base.Backend`."""
        unmet = []
        if request.op not in OPERATORS:
            unmet.append(f"{request.op} has no kernel here, only {', '.join(OPERATORS)} (the triton backend serves it)")
        elif request.op == "verify" and request.rollback != "replay":
            unmet.append("verify with a slot a position has no kernel here, only replay (the triton backend serves it)")
        device = request.device
        if device.vendor != "nvidia" or device.capability != (9, 0):
            unmet.append(f"needs an NVIDIA GPU of compute capability 9.0, got {device}")
        if request.dtype is not torch.bfloat16:
            unmet.append(f"needs bfloat16 inputs, got {str(request.dtype).removeprefix('torch.')}")
        if (request.key_dim, request.value_dim) != (128, 128):
            unmet.append(f"needs head dims K = V = 128, got K = {request.key_dim}, V = {request.value_dim}")
        if request.requires_grad:
            unmet.append("has no backward pass")
        return [*unmet, *_missing_packages()]

    def workspace_bytes(self, op: Op, sizes: Sizes) -> int:
        """See `rapidkda.backends.base.Backend`."""
        from .host.plan import workspace_bytes

        if op != "prefill" or sizes.segments == 0:
            return 0
        return workspace_bytes(sizes.tokens, sizes.value_heads, _MAX_MULTIPROCESSORS)

    def prefill(self, call: PrefillCall) -> None:
        """See `rapidkda.backends.base.Backend`."""
        _run()(call)

    def unfused(self, call: PrefillCall) -> dict[str, list[str]]:
        """See `rapidkda.backends.base.FusingBackend`."""
        from .host.fuse import unfused

        return unfused(call)

    def decode(self, call: DecodeCall) -> None:
        raise NotImplementedError("the cuda backend has no decode kernel; unmet() says so")

    def verify(self, call: VerifyCall) -> None:
        """See `rapidkda.backends.base.Backend`."""
        _steps().verify(call)

    def commit(self, call: CommitCall) -> None:
        """See `rapidkda.backends.base.Backend`."""
        _steps().commit(call)

    def conv(self, call: ConvCall) -> None:
        raise NotImplementedError("the cuda backend has no convolution kernel; unmet() says so")

    def norm(self, call: NormCall) -> None:
        raise NotImplementedError("the cuda backend has no norm kernel; unmet() says so")


@functools.cache
def _run() -> Callable[[PrefillCall], None]:
    """The launch; an import statement takes half a microsecond each time it is passed."""
    from .host.prefill import run

    return run


@functools.cache
def _steps() -> ModuleType:
    from .host import steps

    return steps


@functools.cache
def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is absent
        return False


@functools.cache
def _missing_packages() -> tuple[str, ...]:
    missing = [package for module, package in _PACKAGES.items() if not _installed(module)]
    if missing:
        return (f"needs the packages {', '.join(missing)} (pip install rapidkda[cuda])",)
    from . import compiler

    try:
        compiler.compiler_version()
    except (CompilationError, RuntimeError) as error:  # cuda-bindings raises RuntimeError where the library is absent
        return (f"needs NVRTC, package nvidia-cuda-nvrtc (pip install rapidkda[cuda]): {error}",)
    return ()


def compile_all(arch: str = "sm_90a") -> int:
    """Compile every kernel into the cache; needs no GPU. Returns how many had to be compiled."""
    from . import compiler
    from .host import prefill, steps

    before = compiler.compile_count()
    for kernel in (*prefill.kernels(), *steps.kernels()):
        compiler.compiled(kernel, arch)
    return compiler.compile_count() - before
