"""Launching a kernel with little host time, and the arguments that every kernel over the token axis takes.

Triton's own call inspects every argument to find the compiled kernel, which takes longer than a decode step runs. A
`Launcher` looks it up by what decides it: dtypes, pointer alignment, strides and constants.
"""

from __future__ import annotations

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


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


class Launcher:
    """A kernel whose parameters come as data pointers, table pointers, sizes, strides, constants, in this order.

    Sizes are the parameters that the kernel does not specialise on; they must fit 32 bits. Launches on the current
    stream of the tensors' device.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        data: tuple[Tensor | None, ...],
        tables: tuple[Tensor | None, ...],
        sizes: tuple[int | float, ...],
        strides: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        compile_only: bool = False,
    ) -> bool:
        """Launch, or only make sure that a launch will find its kernel. True if a kernel was compiled for it."""
        arguments = (*data, *tables, *sizes, *strides, *constants)
        device = next(x for x in data if x is not None).device
        if is_gpu(device) and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._run(grid, data, tables, strides, constants, num_warps, arguments, device, compile_only)
        return self._run(grid, data, tables, strides, constants, num_warps, arguments, device, compile_only)

    def _run(
        self,
        grid: tuple[int, int, int],
        data: tuple[Tensor | None, ...],
        tables: tuple[Tensor | None, ...],
        strides: tuple[int, ...],
        constants: tuple[Any, ...],
        num_warps: int,
        arguments: tuple[Any, ...],
        device: torch.device,
        compile_only: bool,
    ) -> bool:
        bits = 0
        for x in data:
            if x is not None:
                bits |= x.data_ptr()
        aligned: Any = True
        if bits & 15:
            aligned = tuple(x is None or x.data_ptr() % 16 == 0 for x in data)
        dtypes = tuple([None if x is None else x.dtype for x in (*data, *tables)])
        key = (device.index, num_warps, aligned, dtypes, strides, constants)
        compiled = self.compiled.get(key)
        if compiled is None:
            if compile_only:
                compiled = self.kernel.warmup(*arguments, grid=grid, num_warps=num_warps)
            else:
                compiled = self.kernel[grid](*arguments, num_warps=num_warps)
            if not is_gpu(device) or env.flag("TRITON_INTERPRET"):
                return False  # nothing to find again: interpreted, or compiled for a target that is not here
            self.compiled[key] = compiled
            return True
        if compile_only:
            return False
        compiled.run(
            *grid,
            current_stream(device),
            compiled.function,
            compiled.packed_metadata,
            None,
            knobs.runtime.launch_enter_hook,
            knobs.runtime.launch_exit_hook,
            *arguments,
        )
        return False


def inputs(tokens: Tokens) -> tuple[Tensor | None, ...]:
    """q, k, v, g, beta, A_log, dt_bias."""
    return (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta, tokens.gate.A_log, tokens.gate.dt_bias)


def scalars(tokens: Tokens) -> tuple[float, float, float]:
    """scale, beta_scale, lower_bound."""
    bound = tokens.gate.lower_bound
    return tokens.scale, tokens.beta_scale, 0.0 if bound is None else bound


def strides(tokens: Tokens) -> tuple[int, ...]:
    """Token and head strides of q, k, v, g and beta, in elements."""
    return (
        *tokens.q.stride()[:2],
        *tokens.k.stride()[:2],
        *tokens.v.stride()[:2],
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
