"""Launching a kernel with little host time, and the arguments that every kernel over the token axis takes.

Triton's own call inspects every argument to find the compiled kernel, which takes longer than a decode step runs. What
decides it are dtypes, pointer alignment, strides and constants. Of these, calls of one kind (`rapidkda.problem`) differ
in alignment alone, so a call of a known kind goes from addresses to the driver: it keeps its `Launch`es in its memo.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from ... import env
from ...problem import GateKind, Tokens

# Segment and slot tables are slices of one buffer: their alignment changes with the number of segments, and must not
# make another kernel of a call.
TABLES = ["p_first", "p_length", "p_read", "p_write", "p_has", "p_accepted", "p_begin", "p_offset", "p_slot"]

GATE_CODES: dict[GateKind, int] = {"log_decay": 0, "bounded": 1, "softplus": 2}  # as in blocks.py


def is_gpu(device: torch.device) -> bool:
    """Whether compiled kernels run there; a CPU has the interpreter only."""
    return device.type == "cuda"


class Launcher:
    """A kernel whose parameters come as data pointers, table pointers, sizes, strides, constants, in this order.

    Sizes are the parameters that the kernel does not specialise on; they must fit 32 bits.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def bind(
        self,
        device: torch.device,
        grid: tuple[int, int, int],
        sizes: tuple[int | float, ...],
        strides: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        views: tuple[torch.dtype | None, ...] = (),
        registers: int | None = None,
    ) -> Launch:
        """Everything but the tensors. `views` are the dtypes that the data tensors, flat bytes, are read as; None, or
        past its end, is a tensor's own. `registers` bounds those of a thread, on NVIDIA GPUs."""
        options = {"num_warps": num_warps} | ({} if registers is None else {"maxnreg": registers})
        return Launch(self, device, grid, sizes, strides, constants, options, views)


class Launch:
    """A launch of a kind of call, on the current stream of its device: all of it but the tensors."""

    def __init__(
        self,
        launcher: Launcher,
        device: torch.device,
        grid: tuple[int, int, int],
        sizes: tuple[int | float, ...],
        strides: tuple[int, ...],
        constants: tuple[Any, ...],
        options: dict[str, int],
        views: tuple[torch.dtype | None, ...],
    ):
        self._launcher = launcher
        self._device = device
        self._index = device.index if is_gpu(device) else -1
        self._grid = grid
        self._rest = (*sizes, *strides, *constants)
        self._key = (device.index, tuple(options.items()), strides, constants)
        self._options = options
        self._views = views
        self._found: dict[Any, Any] = {}  # compiled kernels by alignment

    def __call__(
        self, data: tuple[Tensor | None, ...], tables: tuple[Tensor | None, ...], compile_only: bool = False
    ) -> bool:
        """Launch, or only make sure that a launch will find its kernel. True if a kernel was compiled for it."""
        index = self._index
        if index >= 0 and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self(data, tables, compile_only)
        bits = 0
        addresses: list[int | None] = []
        for x in data:
            address = None if x is None else x.data_ptr()
            bits |= address or 0
            addresses.append(address)
        aligned = bits & 15 == 0 or tuple([address is None or address % 16 == 0 for address in addresses])
        compiled = self._found.get(aligned)
        if compiled is None:
            return self._first(data, tables, aligned, compile_only)
        if compile_only:
            return False
        for x in tables:
            addresses.append(None if x is None else x.data_ptr())
        compiled.run(
            *self._grid,
            torch._C._cuda_getCurrentRawStream(index),
            compiled.function,
            compiled.packed_metadata,
            None,
            _hook(knobs.runtime.launch_enter_hook),
            _hook(knobs.runtime.launch_exit_hook),
            *addresses,
            *self._rest,
        )
        return False

    def _first(
        self, data: tuple[Tensor | None, ...], tables: tuple[Tensor | None, ...], aligned: Any, compile_only: bool
    ) -> bool:
        """A launch through Triton's own call, which compiles, unless another kind of call has the kernel already."""
        data = tuple([_read_as(x, dtype) for x, dtype in zip_longest(data, self._views)])
        key = (*self._key, aligned, tuple([None if x is None else x.dtype for x in (*data, *tables)]))
        known = self._launcher.compiled
        if key in known:
            self._found[aligned] = known[key]
            return self(data, tables, compile_only)
        arguments = (*data, *tables, *self._rest)
        kernel = self._launcher.kernel
        if compile_only:
            compiled = kernel.warmup(*arguments, grid=self._grid, **self._options)
        else:
            compiled = kernel[self._grid](*arguments, **self._options)
        if self._index < 0 or env.flag("TRITON_INTERPRET"):
            return False  # nothing to find again: interpreted, or compiled for a target that is not here
        self._found[aligned] = known[key] = compiled
        return True


def _read_as(x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """A view of another dtype; of bytes, as many as fill elements."""
    if x is None or dtype is None:
        return x
    return x[: x.shape[0] // dtype.itemsize * dtype.itemsize].view(dtype)


def _hook(hook: Any) -> Any:
    """A hook of Triton's, or None if calling it would do nothing."""
    return hook if getattr(hook, "calls", True) else None


def inputs(tokens: Tokens, values: bool = True) -> tuple[Tensor | None, ...]:
    """q, k, v (if `values`), g, beta, A_log, dt_bias."""
    gate = tokens.gate
    v = (tokens.v,) if values else ()
    return (tokens.q, tokens.k, *v, tokens.g, tokens.beta, gate.A_log, gate.dt_bias)


def scalars(tokens: Tokens) -> tuple[float, float, float]:
    """scale, beta_scale, lower_bound."""
    bound = tokens.gate.lower_bound
    return tokens.scale, tokens.beta_scale, 0.0 if bound is None else bound


def strides(tokens: Tokens, values: bool = True) -> tuple[int, ...]:
    """Token and head strides of q, k, v (if `values`), g and beta, in elements."""
    return (
        *tokens.q.stride()[:2],
        *tokens.k.stride()[:2],
        *(tokens.v.stride()[:2] if values else ()),
        *tokens.g.stride()[:2],
        *tokens.beta.stride(),
    )


def constants(tokens: Tokens) -> tuple[Any, ...]:
    """GATE, LOGITS, L2NORM, K, V."""
    return (
        GATE_CODES[tokens.gate.kind],
        tokens.beta_logits,
        tokens.l2norm,
        tokens.key_dim,
        tokens.value_dim,
    )


def stride(x: Tensor | None) -> int:
    """First stride of an optional tensor."""
    return 0 if x is None else x.stride(0)


def rows(pool: Tensor | None) -> int:
    """Slots of an optional pool."""
    return 0 if pool is None else pool.shape[0]
