"""Launching a kernel with little host time, and the arguments that every kernel over the token axis takes.

Triton's own call inspects every argument to find the compiled kernel, which takes longer than a decode step runs. What
decides it are dtypes, pointer alignment, strides and constants. Of these, calls of one kind (`rapidkda.problem`) differ
in alignment alone, so a call of a known kind goes from addresses to the driver: it keeps its `Launch`es in its memo.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from ... import env
from ...problem import GateKind, Repeat, Tokens
from ..driver import Launches, Shape

# Segment and slot tables are slices of one buffer: their alignment changes with the number of segments, and must not
# make another kernel of a call.
TABLES = ["p_first", "p_length", "p_read", "p_write", "p_has", "p_accepted", "p_begin", "p_offset", "p_slot", "p_held"]
# Sizes of decode, verification and commit, which change from step to step and must not either.
STEP_SIZES = ["tokens", "pool_rows", "pad_slot", "positions", "group"]

GATE_CODES: dict[GateKind, int] = {"log_decay": 0, "bounded": 1, "softplus": 2}  # as in blocks.py


def is_gpu(device: torch.device) -> bool:
    """Whether compiled kernels run there; a CPU has the interpreter only."""
    return device.type == "cuda"


Run = Callable[[int, Sequence[int]], None]  # with the stream and the addresses that are not None


class Launcher:
    """A kernel whose parameters come as data pointers, table pointers, sizes, strides, constants, in this order.

    Sizes are the parameters that the kernel does not specialise on; they must fit 32 bits.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.compiled: dict[tuple[Any, ...], Compiled] = {}

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
        overlap: bool = False,
    ) -> Launch:
        """Everything but the tensors. `views` are the dtypes that the data tensors, flat bytes, are read as; None, or
        past its end, is a tensor's own. On NVIDIA GPUs, `registers` bounds those of a thread, and
        `overlap` lets the kernel start before the one before it has ended; it waits for that itself."""
        options: dict[str, int] = {"num_warps": num_warps}
        if registers is not None:
            options["maxnreg"] = registers
        if overlap:
            options["launch_pdl"] = True
        return Launch(self, device, grid, sizes, strides, constants, options, views)


class Launch:
    """A launch of a kind of call, on the current stream of its device: all of it but the tensors. Which of them are
    None belongs to the kind."""

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
        self.index = device.index if is_gpu(device) else -1
        self._grid = grid
        self._rest = (*sizes, *strides, *constants)
        self._key = (device.index, tuple(options.items()), strides, constants)
        self._options = options
        self._views = views
        self._found: dict[Any, Run] = {}  # how to launch, by the alignment of the data
        self._aligned: Compiled | None = None  # the kernel where all of the data are aligned
        self._steps = Steps()

    def __call__(
        self, data: tuple[Tensor | None, ...], tables: tuple[Tensor | None, ...], compile_only: bool = False
    ) -> bool:
        """Launch, or only make sure that a launch will find its kernel. True if a kernel was compiled for it."""
        index = self.index
        if index >= 0 and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(data, tables, compile_only)
        addresses = [x.data_ptr() for x in data if x is not None]
        aligned = functools.reduce(operator.or_, addresses) % 16 == 0 or tuple([x % 16 == 0 for x in addresses])
        launch = self._found.get(aligned)
        if launch is None:
            return self._first(data, tables, aligned, compile_only)
        if not compile_only:
            addresses += [x.data_ptr() for x in tables if x is not None]
            launch(torch._C._cuda_getCurrentRawStream(index), addresses)
        return False

    def _first(
        self, data: tuple[Tensor | None, ...], tables: tuple[Tensor | None, ...], aligned: Any, compile_only: bool
    ) -> bool:
        """A launch through Triton's own call, which compiles, unless another kind of call has the kernel already."""
        typed = list(zip_longest(data, self._views))
        dtypes = [None if x is None else dtype or x.dtype for x, dtype in (*typed, *[(x, None) for x in tables])]
        key = (*self._key, aligned, tuple(dtypes))
        known = self._launcher.compiled.get(key)
        if known is not None:
            self._keep(aligned, known)
            return self(data, tables, compile_only)
        arguments = (*[_read_as(x, dtype) for x, dtype in typed], *tables, *self._rest)
        kernel = self._launcher.kernel
        if compile_only:
            compiled = kernel.warmup(*arguments, grid=self._grid, **self._options)
        else:
            compiled = kernel[self._grid](*arguments, **self._options)
        if self.index < 0 or env.flag("TRITON_INTERPRET"):
            return False  # nothing to find again: interpreted, or compiled for a target that is not here
        known = Compiled(compiled, [dtype is None for dtype in dtypes], len(self._rest))
        self._launcher.compiled[key] = known
        self._keep(aligned, known)
        return True

    def alone(self, call: Any, data: tuple[Tensor | None, ...], tables: tuple[Tensor | None, ...]) -> bool:
        """The one launch of a call; the same as `Steps.run`."""
        return self._steps.run(call, [(self, data, tables)])

    def placed(self) -> Placed | None:
        """It with all of the data aligned, once it is known how the driver takes that."""
        known = self._aligned
        return None if known is None or not known.direct else known.place(self._grid, self._rest)

    def _keep(self, aligned: Any, known: Compiled) -> None:
        self._found[aligned] = self._bound(known)
        if aligned is True:
            self._aligned = known

    def _bound(self, known: Compiled) -> Run:
        """How to launch a compiled kernel."""
        compiled = known.kernel
        run = compiled.run  # loads the kernel, also one that was only compiled

        def through_triton(stream: int, addresses: Sequence[int]) -> None:
            given = iter(addresses)
            run(
                *self._grid,
                stream,
                compiled.function,
                compiled.packed_metadata,
                None,
                knobs.runtime.launch_enter_hook,
                knobs.runtime.launch_exit_hook,
                *[None if missing else next(given) for missing in known.absent],
                *self._rest,
            )

        if not known.direct:
            return through_triton
        direct = together(self.index, [known.place(self._grid, self._rest)])

        def through_the_driver(stream: int, addresses: Sequence[int]) -> None:
            if _hooked():  # a profiler of Triton's wants to see its launches
                through_triton(stream, addresses)
            else:
                direct(stream, addresses)

        return through_the_driver


class Compiled:
    """A compiled kernel, and how its parameters lie in memory: in slots of 8 bytes, addresses first.

    Args:
        kernel: Triton's.
        absent: which of its pointers are None.
        rest: how many arguments follow the pointers.

    Not `direct` where Triton's own launch does more than start the kernel: on another vendor's device, with scratch
    memory of Triton's, clusters, cooperative grids, or parameters of other types than ours.
    """

    def __init__(self, kernel: Any, absent: list[bool], rest: int):
        self.kernel = kernel
        self.absent = absent
        self.direct = False
        about = kernel.metadata
        if about.target.backend != "cuda" or about.global_scratch_size or about.profile_scratch_size:
            return
        if about.num_ctas != 1 or about.launch_cooperative_grid:
            return
        types = list(kernel.src.signature.values())
        pointers, values = types[: len(absent)], types[len(absent) :]
        given = [kind for kind, missing in zip(pointers, absent) if not missing]
        self._kept = [n for n, kind in enumerate(values) if kind != "constexpr"]
        packed = [_PACKED.get(values[n]) for n in self._kept]
        if len(values) != rest or None in packed or not all(kind.startswith("*") for kind in given):
            return
        self._layout = struct.Struct("<" + "".join(map(str, packed)) + "8x" * _SCRATCH)
        self.direct = True

    def place(self, grid: tuple[int, int, int], rest: tuple[Any, ...]) -> Placed:
        """A launch of it, with the addresses left open."""
        about = self.kernel.metadata
        shape = Shape(self.kernel.function, grid, about.num_warps * 32, about.shared, bool(about.launch_pdl))
        return Placed(shape, self.absent.count(False), self._layout.pack(*[rest[n] for n in self._kept]))


class Placed(NamedTuple):
    """A launch: how many addresses it takes, and the parameters after them."""

    shape: Shape
    addresses: int
    values: bytes


def together(device: int, launches: Sequence[Placed]) -> Launches:
    """Launches that take their addresses, one after another's, at once."""
    total = 8 * sum([one.addresses for one in launches])
    kernels, taken, values = [], 0, total
    for one in launches:
        addresses = range(taken, taken + 8 * one.addresses, 8)
        kernels.append((one.shape, [*addresses, *range(values, values + len(one.values), 8)]))
        taken, values = taken + 8 * one.addresses, values + len(one.values)
    parameters = bytes(total) + b"".join([one.values for one in launches])
    return Launches(device, kernels, parameters, struct.Struct(f"<{total // 8}Q"))


Step = tuple[Launch, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]  # with data and tables


class Steps:
    """The launches of a kind of call, one after another."""

    def __init__(self) -> None:
        self._device = -1
        self._together: Launches | None = None  # all of them, where all data are aligned

    def run(self, call: Any, steps: Sequence[Step]) -> bool:
        """Launch them. True if a kernel was compiled for one."""
        compiled = [launch(data, tables) for launch, data, tables in steps]
        if self._together is None:  # until every kernel is known
            self._together = self._joined(steps)
        if self._together is not None:
            data = [x for _, data, _ in steps for x in data if x is not None]
            tensors = [x for _, data, tables in steps for x in (*data, *tables) if x is not None]
            call.repeat = Repeat(tuple(tensors), self.launch, tuple(data))
        return any(compiled)

    def launch(self, addresses: tuple[int, ...]) -> bool:
        """Launch them all from their addresses; False on another device, or where a profiler of Triton's looks on."""
        if self._together is None or self._device != torch._C._cuda_getDevice() or _hooked():
            return False
        self._together(torch._C._cuda_getCurrentRawStream(self._device), addresses)
        return True

    def _joined(self, steps: Sequence[Step]) -> Launches | None:
        placed = [one for one in [launch.placed() for launch, _, _ in steps] if one is not None]
        if not steps or len(placed) < len(steps):
            return None
        self._device = steps[0][0].index
        return together(self._device, placed)


_PACKED = {"i32": "i4x", "i64": "q", "fp32": "f4x"}
_SCRATCH = 2  # pointers to scratch memory of Triton's, which every kernel takes last


def _hooked() -> bool:
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _read_as(x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """A view of another dtype; of bytes, as many as fill elements."""
    if x is None or dtype is None:
        return x
    return x[: x.shape[0] // dtype.itemsize * dtype.itemsize].view(dtype)


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
