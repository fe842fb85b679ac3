"""Compilation and its cache, without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("cuda.core")

from rapidkda.backends.cuda import compile_all, compiler
from rapidkda.backends.cuda.compiler import KernelSource
from rapidkda.backends.cuda.host import steps
from rapidkda.backends.cuda.host.prefill import CORRECT, kernels
from rapidkda.errors import CompilationError

SMALL = KernelSource("small.cu", "small")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources of our own, and an empty cache."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "inner.cuh").write_text("#pragma once\nconstexpr int kValue = 1;\n")
    (folder / "outer.cuh").write_text('#pragma once\n#include "inner.cuh"\n')
    (folder / "small.cu").write_text(
        '#include "outer.cuh"\nextern "C" __global__ void small(int* p) { *p = kValue; }\n'
    )
    monkeypatch.setattr(compiler, "SOURCES", folder)
    monkeypatch.setenv("RAPIDKDA_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def test_a_second_compile_comes_from_the_cache(sources: Path) -> None:
    before = compiler.compile_count()
    first = compiler.compiled(SMALL)
    assert compiler.compile_count() == before + 1
    assert compiler.compiled(SMALL) == first
    assert compiler.compile_count() == before + 1
    assert first[:4] == b"\x7fELF"


def test_the_key_covers_included_headers_macros_arch_and_compiler(sources: Path) -> None:
    version = compiler.compiler_version()
    key = compiler.cache_key(SMALL, "sm_90a", version)
    assert compiler.cache_key(SMALL, "sm_90a", version) == key
    assert compiler.cache_key(SMALL, "sm_100a", version) != key
    assert compiler.cache_key(SMALL, "sm_90a", "nvrtc 99.0") != key
    assert compiler.cache_key(KernelSource("small.cu", "small", (("A", "1"),)), "sm_90a", version) != key
    (sources / "inner.cuh").write_text("#pragma once\nconstexpr int kValue = 2;\n")
    assert compiler.cache_key(SMALL, "sm_90a", version) != key


def test_a_broken_source_raises_with_the_compilers_log(sources: Path) -> None:
    (sources / "small.cu").write_text('extern "C" __global__ void small(int* p) { *p = no_such_name; }\n')
    with pytest.raises(CompilationError, match="no_such_name"):
        compiler.compiled(SMALL)


def test_a_cache_that_cannot_be_written_is_no_failure(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("RAPIDKDA_CACHE_DIR", str(blocked))
    assert compiler.compiled(SMALL)[:4] == b"\x7fELF"
    assert "cannot be kept" in caplog.text


def test_nothing_half_written_is_left_behind(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(compiler.os, "replace", fail)
    compiler.compiled(SMALL)
    assert list((tmp_path / "cache" / "cuda").iterdir()) == []


def test_kernels_use_no_header_of_torch_or_of_the_toolkit() -> None:
    for kernel in (*kernels(), *steps.kernels()):
        for name, text in compiler.source_files(kernel.file).items():
            assert "#include <" not in text, name


def test_every_kernel_compiles_ahead_of_time_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPIDKDA_CACHE_DIR", str(tmp_path))
    everything = [*kernels(), *steps.kernels()]
    assert compile_all() == len(everything) == 56
    assert compile_all() == 0
    assert len(list((tmp_path / "cuda").glob("*.cubin"))) == len(everything)
    assert CORRECT in kernels()
    shutil.rmtree(tmp_path / "cuda")


def test_threads_that_ask_for_a_kernel_at_once_get_the_same_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches keep its function only: with a second copy, the first would be unloaded under them."""
    libraries: list[object] = []
    info = ctypes.create_string_buffer(12)

    def library(code: bytes) -> SimpleNamespace:
        libraries.append(code)
        number = len(libraries)
        return SimpleNamespace(handle=number, get_kernel=lambda entry: SimpleNamespace(handle=number))

    core, bindings = ModuleType("cuda.core"), ModuleType("cuda.bindings")
    core.ObjectCode = SimpleNamespace(from_cubin=library)  # type: ignore[attr-defined]
    bindings.driver = SimpleNamespace(  # type: ignore[attr-defined]
        cuLibraryGetGlobal=lambda handle, name: (0, ctypes.addressof(info), 12),
        cuMemcpyDtoH=lambda to, address, size: (0, None),
        cuKernelGetFunction=lambda handle: (0, 1000 + handle),
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=0),
        cuFuncSetAttribute=lambda *arguments: (0, None),
    )
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(compiler, "compiled", lambda kernel: b"")
    monkeypatch.setattr(compiler, "_loaded", {})
    meeting = threading.Barrier(2, timeout=60)  # nothing is loaded before both have asked
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: meeting.wait())
    kernel = KernelSource("small.cu", "for_threads")
    got: list[compiler.LoadedKernel] = []
    threads = [threading.Thread(target=lambda: got.append(compiler.load(kernel, 0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(libraries) == 1
    assert got[0] is got[1] is compiler.load(kernel, 0)
