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


class Shape(NamedTuple):
    """A kernel and how many threads run it."""

    function: int  # CUfunction
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    overlap: bool = False  # start before the kernel before it has ended; the kernel waits for that itself


class Launches:
    """Launches of a kind of call, one after another, on the same parameters.

    Args:
        device: ordinal of the device that the kernels are loaded on.
        shapes: the kernels.
        parameters: their values as the kernels read them, with the addresses left open.
        offsets: where each parameter starts.
        addresses: layout of what every call packs into the parameters.
        start: where it packs it.
    """

    def __init__(
        self,
        device: int,
        shapes: Sequence[Shape],
        parameters: bytes,
        offsets: Sequence[int],
        addresses: struct.Struct,
        start: int = 0,
    ):
        self._device = device
        self._shapes = tuple(shapes)
        self._parameters = parameters
        self._offsets = tuple(offsets)
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
            frame = _Frame(self._shapes, self._parameters, self._offsets)
        self._pack_into(frame.parameters, self._start, *addresses)
        if frame.stream != stream:
            frame.put_on(stream)
        launch, pointers = self._launch, frame.pointers_at
        for configuration_at, function in frame.launches:
            status = launch(configuration_at, function, pointers, None)
            if status == _INVALID_CONTEXT:  # the first driver call of this thread
                _enter_context(self._device)
                status = launch(configuration_at, function, pointers, None)
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

    __slots__ = ("_configurations", "_pointers", "launches", "parameters", "pointers_at", "stream")

    def __init__(self, shapes: Sequence[Shape], parameters: bytes, offsets: Sequence[int]):
        self.parameters = ctypes.create_string_buffer(parameters, len(parameters))
        start = ctypes.addressof(self.parameters)
        self._pointers = (ctypes.c_void_p * len(offsets))(*[start + offset for offset in offsets])
        self.pointers_at = ctypes.addressof(self._pointers)
        overlap = ctypes.addressof(_OVERLAP)
        self._configurations = [
            _Configuration(
                shape.grid,
                (shape.threads, 1, 1),
                shape.shared_bytes,
                attributes=overlap if shape.overlap else None,
                attribute_count=int(shape.overlap),
            )
            for shape in shapes
        ]
        places = map(ctypes.addressof, self._configurations)
        self.launches = list(zip(places, (shape.function for shape in shapes), strict=True))
        self.stream = 0

    def put_on(self, stream: int) -> None:
        """Launch on this stream from now on."""
        for configuration in self._configurations:
            configuration.stream = stream
        self.stream = stream


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
