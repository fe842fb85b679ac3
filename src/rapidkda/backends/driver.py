"""Kernel launches through the CUDA driver, for the backends that know a launch before they know its addresses.

A launch costs the host what the driver takes, 4 us or so, plus what it takes to tell the driver. So everything that
calls of one kind share lies in memory in the form that `cuLaunchKernelEx` reads: configurations, parameters, pointers
to the parameters. A launch packs the addresses into it and passes three pointers.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_OVERLAP_SINCE = 12030  # CUDA 12.3: graphs hold launches that overlap


class Shape(NamedTuple):
    """A kernel and how many threads run it."""

    function: int  # CUfunction
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    overlap: bool = False  # start before the kernel before it has ended; the kernel waits for that itself


class Launches:
    """Launches of a kind of call, one after another, whose parameters lie in one memory.

    Args:
        device: ordinal of the device that the kernels are loaded on.
        kernels: the kernels, and where each of their parameters starts.
        parameters: their values as the kernels read them, with the addresses left open.
        addresses: layout of what every call packs into the parameters.
        start: where it packs it.
    """

    def __init__(
        self,
        device: int,
        kernels: Sequence[tuple[Shape, Sequence[int]]],
        parameters: bytes,
        addresses: struct.Struct,
        start: int = 0,
    ):
        self._device = device
        self._kernels = tuple(kernels)
        self._parameters = parameters
        self._pack_into = addresses.pack_into
        self._start = start
        self._launch = _entry("cuLaunchKernelEx")
        # The driver copies what it reads, so a few frames in turn serve any number of launches. One in use is never
        # taken a second time, whatever thread asks.
        self._free: list[_Frame] = []

    def __call__(self, stream: int, addresses: Sequence[Any]) -> None:
        """Launch on a stream of the device, the current one."""
        try:
            frame = self._free.pop()
        except IndexError:
            frame = _Frame(self._kernels, self._parameters)
        self._pack_into(frame.parameters, self._start, *addresses)
        if frame.stream != stream:
            frame.put_on(stream)
        for arguments in frame.launches:
            status = self._launch(*arguments)
            if status == _INVALID_CONTEXT:  # the first driver call of this thread
                _enter_context(self._device)
                status = self._launch(*arguments)
            if status:
                _check(status)
        self._free.append(frame)


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


_OVERLAP = _Attribute(6, 0, (1,))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: allowed


class _Frame:
    """What the driver reads of a call's launches."""

    __slots__ = ("_configurations", "_pointers", "launches", "parameters", "stream")

    def __init__(self, kernels: Sequence[tuple[Shape, Sequence[int]]], parameters: bytes):
        self.parameters = ctypes.create_string_buffer(parameters, len(parameters))
        start = ctypes.addressof(self.parameters)
        overlaps = [shape.overlap and may_overlap() for shape, _ in kernels]
        overlap = ctypes.addressof(_OVERLAP)
        self._pointers = [
            (ctypes.c_void_p * len(offsets))(*[start + offset for offset in offsets]) for _, offsets in kernels
        ]
        self._configurations = [
            _Configuration(
                shape.grid,
                (shape.threads, 1, 1),
                shape.shared_bytes,
                attributes=overlap if overlapped else None,
                attribute_count=int(overlapped),
            )
            for (shape, _), overlapped in zip(kernels, overlaps, strict=True)
        ]
        self.launches = [  # arguments of cuLaunchKernelEx
            (ctypes.addressof(configuration), shape.function, ctypes.addressof(pointers), None)
            for configuration, (shape, _), pointers in zip(self._configurations, kernels, self._pointers, strict=True)
        ]
        self.stream = 0

    def put_on(self, stream: int) -> None:
        """Launch on this stream from now on."""
        for configuration in self._configurations:
            configuration.stream = stream
        self.stream = stream


@functools.cache
def may_overlap() -> bool:
    """Whether the driver knows launches that start before the one before them has ended, in graphs too. Where it does
    not, kernels wait for nothing and run one after another."""
    try:
        version = ctypes.c_int()
        _check(_library().cuDriverGetVersion(ctypes.byref(version)))
    except OSError:  # no driver: nothing is launched
        return True
    return version.value >= _OVERLAP_SINCE


@functools.cache
def _entry(name: str) -> Any:
    """A function of the driver that takes pointers only."""
    function = getattr(_library(), name)
    function.argtypes = [ctypes.c_void_p] * 4
    function.restype = ctypes.c_int
    return function


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def _enter_context(device: int) -> None:
    """Make the context that torch uses on a device current in this thread."""
    context = ctypes.c_void_p()
    _check(_library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check(_library().cuCtxSetCurrent(context))


def _check(status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        unknown = _library().cuGetErrorName(status, ctypes.byref(name))
        said = f"error {status}" if unknown or name.value is None else name.value.decode()
        raise RuntimeError(f"CUDA driver call failed: {said}")
