"""Launches of csrc/replay.cu: verification by replay, and commit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .... import env
from ....problem import CommitCall, Repeat, VerifyCall
from ...driver import Launches, Shape
from .. import compiler
from ..compiler import KernelSource
from . import step_params
from .prefill import multiprocessors
from .step_params import ADDRESSES, Constants, Flags

CHUNKS = (2, 4, 8)  # tokens that a replay takes at once
FOLDS = (8, 16, 24)  # records that a replay with deferred states takes at once
_ROW_ALIGNMENT = 16  # bytes; what the copy engine asks of a state's rows
# Which tensors must be aligned for four elements at a time.
_VECTORS = {
    Flags.VECTOR_INPUTS: ("q", "k", "g"),
    Flags.VECTOR_STATES: ("pool",),
    Flags.VECTOR_RECORDS: ("records",),
}
_address = Tensor.data_ptr


@functools.cache
def replay_kernel(state_float: bool, most: int, positions: int | None = None) -> KernelSource:
    """The kernel of the smallest chunk that holds all tokens, or of the largest, which then takes several turns.

    Args:
        state_float: float32 states, else bfloat16.
        most: tokens of a segment; without `positions` also records of a slot.
        positions: records of a slot, where states are deferred.
    """
    tokens = next((size for size in CHUNKS if most <= size), None)
    folds = tokens if positions is None else next((size for size in FOLDS if positions <= size), None)
    if tokens is None or folds is None:
        tokens = folds = CHUNKS[-1]
    macros = {
        "KDA_STATE_FLOAT": str(state_float).lower(),
        "KDA_TOKENS": str(tokens),
        "KDA_FOLDS": str(folds),
        "KDA_DEFERRED": str(positions is not None).lower(),
        "KDA_MANY_TURNS": str(most > tokens or (positions or 0) > folds).lower(),
    }
    if env.racecheck():
        macros["KDA_EVERY_LANE_ARRIVES"] = "1"
    return KernelSource("replay.cu", "replay", tuple(macros.items()))


def kernels() -> list[KernelSource]:
    """Every kernel that a step can need."""
    sizes: list[tuple[int, int | None]] = [(most, None) for most in (*CHUNKS, CHUNKS[-1] + 1)]
    sizes += [*itertools.product(CHUNKS, FOLDS), (CHUNKS[-1] + 1, FOLDS[-1])]
    return [replay_kernel(state_float, *size) for state_float in (True, False) for size in sizes]


def verify(call: VerifyCall) -> None:
    """`Backend.verify`; `unmet` leaves replay."""
    if call.segments.count > 0 and call.tokens.count > 0:
        tensors = (*_inputs(call), call.records, *_tables(call), call.slots, call.accepted, call.held)
        prepared = call.memo.get("cuda")
        if prepared is None:
            if call.records is None:
                raise NotImplementedError("the cuda backend has no kernel for a slot a position; unmet() says so")
            kernel = _kernel(call, call.records, call.segments.max_length)
            later = _later_kernels(call, call.records)
            prepared = call.memo["cuda"] = Prepared(tensors, kernel, _constants(call, call.records), later)
        call.repeat = prepared(tensors)


def commit(call: CommitCall) -> None:
    """`Backend.commit`."""
    if call.slots.shape[0] > 0:
        tensors = (*[None] * 8, call.pool, call.records, None, None, call.slots, call.accepted, call.held)
        prepared = call.memo.get("cuda")
        if prepared is None:
            constants = _state_constants(call, call.records)
            prepared = call.memo["cuda"] = Prepared(tensors, _kernel(call, call.records, 0), constants)
        call.repeat = prepared(tensors)


class Prepared:
    """What calls of a kind share: the kernel, and all of its parameter but addresses.

    Args:
        tensors: of a call, in the order of `ADDRESSES`; which of them are None belongs to the kind.
        kernel: what runs.
        constants: its parameter; the flags of alignment are added for each call's addresses.
        later: kernels of other kinds of calls that will follow; loaded too, so that none compiles in their midst.
    """

    def __init__(
        self,
        tensors: tuple[Tensor | None, ...],
        kernel: KernelSource,
        constants: Constants,
        later: Sequence[KernelSource] = (),
    ):
        named = dict(zip(ADDRESSES, tensors))
        pool = named["pool"]
        index = None if pool is None else pool.device.index
        self._device = torch.cuda.current_device() if index is None else index
        self._kernel = kernel
        self._later = later
        self._constants = constants
        self._present = [x is not None for x in tensors]
        self._vectors = sum(_VECTORS) if constants.flags & Flags.STATE_V_FIRST else sum(_VECTORS) - Flags.VECTOR_STATES
        self._aligned: list[
            tuple[int, int, int]
        ] = []  # place among addresses, bits that must be 0, the flag they decide
        present = [name for name, x in named.items() if x is not None]
        for flag, names in _VECTORS.items():
            for name in names:
                x = named[name]
                if x is not None:
                    mask = _ROW_ALIGNMENT - 1 if name == "pool" else 4 * x.element_size() - 1
                    self._aligned.append((present.index(name), mask, flag))
                    if any(n > 1 and step * x.element_size() & mask for n, step in zip(x.shape[:-1], x.stride())):
                        self._vectors &= ~flag
        self._launches: dict[int, Launches] = {}  # by the flags of alignment

    def __call__(self, tensors: tuple[Tensor | None, ...]) -> Repeat:
        """Launch on the current stream."""
        given = tuple([x for x in tensors if x is not None])
        addresses = tuple(map(_address, given))
        if not self.launch(addresses):
            with torch.cuda.device(self._device):
                self.launch(addresses)
        return Repeat(given, self.launch)

    def launch(self, addresses: tuple[int, ...]) -> bool:
        """Launch on the current stream of the current device; False where that is another one."""
        if self._device != torch._C._cuda_getDevice():
            return False
        vectors = self._vectors
        for place, mask, flag in self._aligned:
            if addresses[place] & mask:
                vectors &= ~flag
        launches = self._launches.get(vectors)
        if launches is None:
            launches = self._launches[vectors] = self._bind(vectors)
        launches(torch._C._cuda_getCurrentRawStream(self._device), addresses)
        return True

    def _bind(self, vectors: int) -> Launches:
        loaded = compiler.load(self._kernel, self._device)
        for kernel in self._later:
            compiler.load(kernel, self._device)
        constants = self._constants._replace(flags=self._constants.flags | vectors)
        grid = min(constants.segments * constants.value_heads, multiprocessors(self._device))
        shape = Shape(loaded.function, (grid, 1, 1), loaded.threads, loaded.shared_bytes, overlap=True)
        return Launches(
            self._device, [(shape, (0,))], step_params.pack(constants), step_params.addresses(self._present)
        )


def _kernel(call: VerifyCall | CommitCall, records: Tensor, most: int) -> KernelSource:
    positions = records.shape[1]
    if call.held is None:
        return replay_kernel(call.pool.dtype is torch.float32, positions)
    return replay_kernel(call.pool.dtype is torch.float32, min(most, positions), positions)


def _later_kernels(call: VerifyCall, records: Tensor) -> list[KernelSource]:
    """With deferred states the longest request of a step picks the kernel: those that other steps may take."""
    if call.held is None:
        return []
    sizes = [most for before, most in zip((0, *CHUNKS), (*CHUNKS, CHUNKS[-1] + 1)) if before < records.shape[1]]
    return [_kernel(call, records, most) for most in sizes]


def _inputs(call: VerifyCall) -> tuple[Tensor | None, ...]:
    tokens = call.tokens
    gate = tokens.gate
    return tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta, gate.A_log, gate.dt_bias, call.out, call.pool


def _tables(call: VerifyCall) -> tuple[Tensor, Tensor]:
    return call.segments.first_token, call.segments.length


def _constants(call: VerifyCall, records: Tensor) -> Constants:
    tokens, gate, beta, out = call.tokens, call.tokens.gate, call.tokens.beta, call.out
    flags = {
        Flags.BETA_FLOAT: beta.dtype is torch.float32,
        Flags.BETA_LOGITS: tokens.beta_logits,
        Flags.L2_NORM: tokens.l2norm,
        Flags.GATE_FLOAT: tokens.g.dtype is torch.float32,
        Flags.BOUNDED_GATE: gate.kind == "bounded",
        Flags.SOFTPLUS_GATE: gate.kind == "softplus",
    }
    state = _state_constants(call, records)
    return state._replace(
        q_token_stride=tokens.q.stride(0),
        q_head_stride=tokens.q.stride(1),
        k_token_stride=tokens.k.stride(0),
        k_head_stride=tokens.k.stride(1),
        v_token_stride=tokens.v.stride(0),
        v_head_stride=tokens.v.stride(1),
        g_token_stride=tokens.g.stride(0),
        g_head_stride=tokens.g.stride(1),
        beta_token_stride=beta.stride(0),
        beta_head_stride=beta.stride(1),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        first_stride=call.segments.first_token.stride(0),
        length_stride=call.segments.length.stride(0),
        tokens=tokens.count,
        group=tokens.value_heads // tokens.heads,
        flags=state.flags | sum(bit for bit, on in flags.items() if on),
        scale=tokens.scale,
        beta_scale=tokens.beta_scale,
        lower_bound=gate.lower_bound or 0.0,
    )


def _state_constants(call: VerifyCall | CommitCall, records: Tensor) -> Constants:
    """Those of states, slots and records: all that a commit has."""
    slots, accepted = call.slots, call.accepted
    flags = {
        Flags.STATE_V_FIRST: call.state_v_first,
        Flags.SLOTS_64: slots.dtype is torch.int64,
        Flags.ACCEPTED_64: accepted.dtype is torch.int64,
    }
    return Constants(
        pool_stride=call.pool.stride(0),
        record_stride=records.stride(0),
        record_position_stride=records.stride(1),
        slot_stride=slots.stride(0),
        accepted_stride=accepted.stride(0),
        segments=slots.shape[0],
        value_heads=call.pool.shape[1],
        pool_rows=call.pool.shape[0],
        pad_slot=call.pad_slot,
        positions=records.shape[1],
        flags=sum(bit for bit, on in flags.items() if on),
    )
