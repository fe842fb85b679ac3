"""Run-time compilation of the kernels: NVRTC from wheels, a compile cache on disk, loading per device.

Nothing here needs a toolkit, torch headers, or, for compiling, a GPU. The key of a cached kernel covers everything that
determines it: the compiler's version, the options, and the text of the source and of every header it includes. A kernel
is written to a temporary file and renamed, so that processes that compile at once never read half of one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ... import env
from ...errors import CompilationError

log = logging.getLogger("rapidkda")

ARCH = "sm_90a"
SOURCES = Path(__file__).parent / "csrc"
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_OPTIONS = ("std=c++17",)

_lock = threading.RLock()
_compilations = 0
_loaded: dict[tuple[KernelSource, int], LoadedKernel] = {}  # by kernel and device


@dataclass(frozen=True)
class KernelSource:
    """One kernel to compile: a file of csrc/, its entry point, and the macros that select its form."""

    file: str
    entry: str
    macros: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.entry}({', '.join(f'{name}={value}' for name, value in self.macros)})"


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device, ready to launch."""

    function: int  # CUfunction
    threads: int
    shared_bytes: int
    cluster: int  # CTAs a cluster
    library: Any  # keeps the module alive


def compile_count() -> int:
    """How many kernels this process has compiled (cache hits do not count). Constant after warm-up."""
    return _compilations


def source_files(name: str) -> dict[str, str]:
    """The text of a file of csrc/ and of every header that it includes, directly or not."""
    found: dict[str, str] = {}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found[current] = (SOURCES / current).read_text(encoding="utf-8")
            waiting.extend(_INCLUDE.findall(found[current]))
    return dict(sorted(found.items()))


def cache_key(kernel: KernelSource, arch: str, compiler: str) -> str:
    """Digest of everything that determines the machine code."""
    digest = hashlib.sha256()
    for part in (compiler, arch, *_OPTIONS, kernel.file, kernel.entry, *(f"{n}={v}" for n, v in kernel.macros)):
        digest.update(part.encode() + b"\0")
    for name, text in source_files(kernel.file).items():
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()


@functools.cache
def compiler_version() -> str:
    """Name and version of the compiler."""
    from cuda.bindings import nvrtc  # type: ignore[import-untyped]

    status, major, minor = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompilationError(f"NVRTC does not answer: {status}")
    return f"nvrtc {major}.{minor}"


def compiled(kernel: KernelSource, arch: str = ARCH) -> bytes:
    """The machine code (cubin) of a kernel, from the cache or freshly compiled."""
    key = cache_key(kernel, arch, compiler_version())
    path = env.cache_dir() / "cuda" / f"{kernel.entry}-{arch}-{key[:32]}.cubin"
    with _lock:
        try:
            return path.read_bytes()
        except OSError:
            pass
        code = _compile(kernel, arch)
        try:
            _write(path, code)
        except OSError as error:
            log.warning("compiled kernels cannot be kept in %s: %s", path.parent, error)
        return code


def _compile(kernel: KernelSource, arch: str) -> bytes:
    from cuda.core import Program, ProgramOptions  # type: ignore[import-untyped]

    global _compilations
    options = ProgramOptions(
        arch=arch,
        std="c++17",
        include_path=str(SOURCES),
        define_macro=list(kernel.macros) or None,
        name=kernel.file,
    )
    text = (SOURCES / kernel.file).read_text(encoding="utf-8")
    try:
        code = Program(text, "c++", options).compile("cubin").code
    except Exception as error:  # cuda-core raises its own types, with the compiler's log in the message
        raise CompilationError(f"{kernel} did not compile for {arch} with {compiler_version()}:\n{error}") from error
    _compilations += 1
    if not isinstance(code, bytes):
        raise CompilationError(f"{kernel} compiled for {arch} to {type(code).__name__} instead of machine code")
    return code


def _write(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def load(kernel: KernelSource, device: int) -> LoadedKernel:
    """A kernel on the device of that ordinal, the current one. The first call synchronises: it cannot be captured.

    One that was loaded stays loaded, since launches hold its function alone: of threads that ask for it at once, the
    first loads it for all.
    """
    found = _loaded.get((kernel, device))
    if found is not None:
        return found
    torch.cuda.synchronize(device)  # where nothing has been allocated yet, this makes the context
    with _lock:
        found = _loaded.get((kernel, device))
        if found is None:
            found = _loaded[kernel, device] = _load(kernel)
        return found


def _load(kernel: KernelSource) -> LoadedKernel:
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    library = ObjectCode.from_cubin(compiled(kernel))
    handle = library.get_kernel(kernel.entry).handle
    info = (ctypes.c_int * 3)()
    address, size = check(driver.cuLibraryGetGlobal(library.handle, b"launch_info"))
    if size != ctypes.sizeof(info):
        raise CompilationError(f"{kernel} has a launch_info of {size} bytes, expected {ctypes.sizeof(info)}")
    check(driver.cuMemcpyDtoH(ctypes.addressof(info), address, size))
    threads, shared_bytes, cluster = info
    function = check(driver.cuKernelGetFunction(handle))  # of the current context
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return LoadedKernel(int(function), threads, shared_bytes, cluster, library)


def check(result: tuple[Any, ...]) -> Any:
    """The values of a driver call, or RuntimeError with the driver's name for the failure."""
    if result[0]:
        raise RuntimeError(f"CUDA driver call failed: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]
