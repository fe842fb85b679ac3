"""Launch of csrc/prefill.cu, and of csrc/correct.cu or csrc/history.cu after it, for one validated call."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .... import env
from ....problem import FusedConv, PrefillCall, Repeat
from ....segments import Segments
from ...driver import Launches, Shape
from .. import compiler
from ..compiler import KernelSource
from . import neighbours, params, schedule
from .params import ORDER_ENTRIES, Constants, Flags
from .plan import CHUNK, Neighbour, Plan, Scratch, plan_prefill
from .tensor_map import ALIGNMENT, tensor_map

CORRECT = KernelSource("correct.cu", "correct")
HISTORY = KernelSource("history.cu", "history")
_HISTORY_CHANNELS = 256  # of a block
_MOST_MAPS = 64  # sets of tensor maps that a kind of call keeps
_MOST_STRIDE = 1 << 27  # elements between rows of an output: kernels address the rows of a chunk in 32 bits

# Where a call has the tensors whose addresses a launch needs: first those that are read through tensor maps, then the
# others in the order of `params.ADDRESSES`.
_MAPPED = ("tokens.q", "tokens.k", "tokens.v", "tokens.g")
_POOLS = ("initial", "final", "checkpoint_pool")
_TABLES = (
    "segments.first_token",
    "segments.length",
    "read_slots",
    "write_slots",
    "has_initial_state",
    "checkpoints.begin",
    "checkpoints.offset",
    "checkpoints.slot",
)
_ADDRESSED = ("tokens.beta", "tokens.gate.A_log", "tokens.gate.dt_bias", "out", *_POOLS, *_TABLES)
_address = Tensor.data_ptr
# Form, and whether its CTAs come in twos.
_FORMS = {"whole": ("kWhole", False), "pair": ("kPair", True), "parallel": ("kTransition", True)}


@functools.cache
def kernel(form: str, bounded: bool, gate_float: bool, convolves: bool = False, norms: bool = False) -> KernelSource:
    """The prefill kernel of a form (`whole`, `pair`, `parallel`), gate kind, dtype of g, what it fuses."""
    name, cluster = _FORMS[form]
    macros = {
        "KDA_FORM": name,
        "KDA_CLUSTER": str(int(cluster)),
        "KDA_BOUNDED": str(bounded).lower(),
        "KDA_GATE_FLOAT": str(gate_float).lower(),
        "KDA_CONVOLVES": str(convolves).lower(),
        "KDA_NORMS": str(norms).lower(),
    }
    if env.racecheck():
        macros["KDA_EVERY_LANE_ARRIVES"] = "1"
    return KernelSource("prefill.cu", "prefill", tuple(macros.items()))


def kernels() -> list[KernelSource]:
    """Every kernel that a prefill call can need."""
    either = (True, False)
    return [
        *itertools.starmap(kernel, itertools.product(_FORMS, either, either)),
        *itertools.starmap(kernel, itertools.product(["whole"], either, either, [True], either)),
        *itertools.starmap(kernel, itertools.product(["whole"], either, either, [False], [True])),
        *itertools.starmap(kernel, itertools.product(["pair"], either, [False], [True])),
        CORRECT,
        HISTORY,
    ]


def plan(call: PrefillCall, sms: int) -> Plan:
    """The form that the cost model chooses for a call. Neighbours are given where they are taken on: see fuse.py."""
    given: list[tuple[Neighbour, object]] = [("conv", call.conv), ("norm", call.norm)]
    fused = tuple([name for name, inputs in given if inputs is not None])
    workspace = None if call.workspace is None else call.workspace.shape[0]
    return plan_prefill(
        *sizes(call), sms, fused, clusters_convolve(call), _checkpoints(call), call.tokens.count, workspace
    )


def clusters_convolve(call: PrefillCall) -> bool:
    """Whether the shared memory of a CTA of a cluster has room for what a convolution reads beside g."""
    return call.tokens.g.dtype is torch.bfloat16


def sizes(call: PrefillCall) -> tuple[int, int, int, int]:
    """Segments, chunks of all of them, chunks of the longest, heads."""
    segments = call.segments
    longest = -(-segments.max_length // CHUNK)
    total = segments.count * longest
    if segments.total >= 0:
        total = min(total, -(-segments.total // CHUNK) + segments.count)  # at most one partial chunk a segment
    return segments.count, total, longest, call.tokens.value_heads


def run(call: PrefillCall, forced: Plan | None = None) -> None:
    """Launch on the current stream. `forced` overrides the planner."""
    if call.segments.count == 0:
        return
    prepared = call.memo.get("cuda") if forced is None else Prepared(call, forced)
    if prepared is None:
        prepared = call.memo["cuda"] = Prepared(call)
    if prepared.device == torch._C._cuda_getDevice():
        prepared.run(call)
    else:
        with torch.cuda.device(prepared.device):
            prepared.run(call)


class Prepared:
    """What calls of a kind share: the plan, the kernels, and all of their parameter but maps and addresses."""

    def __init__(self, call: PrefillCall, forced: Plan | None = None):
        self._place = call.tokens.q.device
        index = self._place.index
        self.device = torch.cuda.current_device() if index is None else index
        self.plan = plan(call, multiprocessors(self.device)) if forced is None else forced
        needed = scratch(call, self.plan)
        self._scratch_bytes, self._scratch_places = needed.bytes, needed.places
        self._own_scratch = call.workspace is None or call.workspace.shape[0] < self._scratch_bytes
        self._present = [_has(call, name) for name in _ADDRESSED]
        self._present_beside = [_has(call, name) for name in neighbours.ADDRESSED]
        present = list(itertools.compress(_ADDRESSED, self._present))
        tables = [name for name in present if name.startswith(("segments", "checkpoints"))]
        self._dense_rows = not _strided_rows(call.out)
        self._dense_tables = all(operator.attrgetter(name)(call).is_contiguous() for name in tables)
        # The tensors whose addresses a launch takes: those with maps, those of neighbours, the others, scratch.
        mapped = _MAPPED if call.norm is None else (*_MAPPED, "norm.z")
        names = [*mapped, *itertools.compress(neighbours.ADDRESSED, self._present_beside), *present]
        self._mapped, self._beside = len(mapped), len(names) - len(present)
        if self._scratch_bytes and not self._own_scratch:
            names.append("workspace")
        self._tensors: Callable[[PrefillCall], tuple[Tensor, ...]] = operator.attrgetter(*names)
        self._pools_at = [names.index(name) for name in _POOLS if name in names]
        self._fuses = call.conv is not None or call.norm is not None
        self._even_slots = call.state_v_first and not any(_first_stride(pool) % 2 for pool in _pools(call))
        self._launches: dict[tuple[bool, bool], Launches] = {}  # by what addresses decide
        self._usual = self._even_slots, True
        self._maps: dict[tuple[int, ...], tuple[bytes, ...]] = {}

    def run(self, call: PrefillCall) -> None:
        """Launch a call of this kind on the current stream of its device, the current one."""
        given, in_place = call, self._dense_rows and self._dense_tables
        if not in_place or call.out.data_ptr() % ALIGNMENT or _misplaced(call.conv):
            call = self._dense(call)
        tensors = self._tensors(call)
        addresses = tuple(map(_address, tensors))
        keep: list[Tensor] = []  # copies that must outlive the launches
        mapped = addresses[: self._mapped]
        maps = self._maps.get(mapped) or self._make_maps(call, mapped, keep)
        vectors = self._even_slots and not any(addresses[place] % 8 for place in self._pools_at)
        variant = vectors, call.out is given.out
        launches = self._launches.get(variant)
        if launches is None:
            launches = self._launches[variant] = self._bind(call, vectors)
        self._start(launches, maps, addresses)
        if call.out is not given.out:
            given.out.copy_(call.out)
        elif call is given:
            weights = () if call.conv is None else (call.conv.weight,)
            pools = [pool for pool in _pools(call) if pool is not None]
            call.repeat = Repeat(tensors, self.launch, (call.out, *pools, *weights))

    def launch(self, addresses: tuple[int, ...]) -> bool:
        """Launch a call that nothing has to be copied for from its addresses; False where it is not known to be one."""
        maps, launches = self._maps.get(addresses[: self._mapped]), self._launches.get(self._usual)
        if maps is None or launches is None or self.device != torch._C._cuda_getDevice():
            return False
        self._start(launches, maps, addresses)
        return True

    def _start(self, launches: Launches, maps: tuple[bytes, ...], addresses: tuple[int, ...]) -> None:
        rest = addresses[self._beside :]
        if self._scratch_bytes:
            if self._own_scratch:  # alive until all is launched: its memory may not be another's before
                workspace = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self._place)
                rest = (*rest, workspace.data_ptr())
            rest = (*rest[:-1], *[rest[-1] + at for at in self._scratch_places])
        values: tuple[Any, ...] = (*maps, *rest)
        if self._fuses:
            values = (maps[0], *addresses[self._mapped : self._beside], maps[1], *rest)
        launches(torch._C._cuda_getCurrentRawStream(self.device), values)  # a tenth of the time of current_stream()

    def _dense(self, call: PrefillCall) -> PrefillCall:
        """The same call on copies of what the kernels cannot address."""
        out, segments, checkpoints, conv = call.out, call.segments, call.checkpoints, call.conv
        if conv is not None and _misplaced(conv):
            conv = replace(conv, weight=conv.weight.clone())  # dense: see fuse.py
        if not self._dense_rows or out.data_ptr() % ALIGNMENT:
            out = out.clone(memory_format=torch.contiguous_format)  # with the rows that no segment covers
        if not self._dense_tables:
            segments = replace(
                segments, first_token=segments.first_token.contiguous(), length=segments.length.contiguous()
            )
            if checkpoints is not None:
                checkpoints = replace(
                    checkpoints,
                    begin=checkpoints.begin.contiguous(),
                    offset=checkpoints.offset.contiguous(),
                    slot=checkpoints.slot.contiguous(),
                )
        return replace(call, out=out, segments=segments, checkpoints=checkpoints, conv=conv)

    def _make_maps(self, call: PrefillCall, addresses: tuple[int, ...], keep: list[Tensor]) -> tuple[bytes, ...]:
        """The tensor maps, those of neighbours first, kept by the addresses that they were made for unless those are of
        copies."""
        maps = (neighbours.maps(call, keep), _maps(call, keep)) if self._fuses else (_maps(call, keep),)
        if not keep:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            self._maps[addresses] = maps
        return maps

    def _bind(self, call: PrefillCall, vectors: bool) -> Launches:
        parts, scratch = self.plan.parts, bool(self._scratch_bytes)
        shares = b"" if scratch else _shares(call, _workers(self.plan, self.device))
        order = b"" if shares else _order(call.segments)
        constants = _constants(call, parts, bool(order), bool(shares), vectors)
        shapes = _shapes(call, self.plan, self.device)
        parameter = params.pack(constants, order, shares)
        present = [*self._present, *[scratch] * 3]
        if not self._fuses:
            kernels = [(shape, (0,)) for shape in shapes]
            return Launches(self.device, kernels, parameter, params.addresses(present))
        return Launches(
            self.device,
            [(shape, (neighbours.SIZE, 0)) for shape in shapes],
            neighbours.pack(call).ljust(neighbours.SIZE, b"\0") + parameter,
            params.addresses(present, neighbours.layout(self._present_beside)),
            neighbours.MAPS_AT,
        )


@functools.cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of the device of that ordinal."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _shapes(call: PrefillCall, chosen: Plan, device: int) -> list[Shape]:
    """The launches of a form, in order."""
    tokens, segments = call.tokens, call.segments
    bounded, gate_float = tokens.gate.kind == "bounded", tokens.g.dtype is torch.float32
    units = segments.count * tokens.value_heads

    def shape(source: KernelSource, x: int, y: int = 1, z: int = 1) -> Shape:
        loaded = compiler.load(source, device)
        return Shape(loaded.function, (x * loaded.cluster, y, z), loaded.threads, loaded.shared_bytes, overlap=True)

    if chosen.form != "parallel":  # CTAs, or clusters of two, that stay and take one head after another
        fused = (call.conv is not None, call.norm is not None)
        main = shape(kernel(chosen.form, bounded, gate_float, *fused), min(units, _workers(chosen, device)))
        if call.conv is None or (call.conv.pool is None and call.conv.checkpoint_pool is None):
            return [main]
        return [main, shape(HISTORY, -(-call.conv.x.shape[1] // _HISTORY_CHANNELS), segments.count)]
    main = shape(kernel("parallel", bounded, gate_float), units * chosen.parts)
    # Last states, slices of the later parts' tokens, checkpoints: as many slices as there is room for at once.
    checkpoints = _checkpoints(call) * tokens.value_heads
    later = units * (chosen.parts - 1)
    slices = max(1, (multiprocessors(device) - units) // later)
    return [main, shape(CORRECT, units + later * slices + checkpoints)]


def scratch(call: PrefillCall, chosen: Plan) -> Scratch:
    """What a plan for a call needs."""
    tokens = call.tokens
    return Scratch(call.segments.count, tokens.count, tokens.value_heads, chosen.parts, _checkpoints(call))


def _checkpoints(call: PrefillCall) -> int:
    return 0 if call.checkpoints is None else call.checkpoints.slot.shape[0]


def _constants(call: PrefillCall, parts: int, ordered: bool, scheduled: bool, vectors: bool) -> Constants:
    """`vectors`: two neighbouring elements of a state's row may be moved at once."""
    tokens, segments, gate, beta, out = call.tokens, call.segments, call.tokens.gate, call.tokens.beta, call.out
    initial, final, checkpoint_pool = call.initial, call.final, call.checkpoint_pool
    read_slots, write_slots, has_initial = call.read_slots, call.write_slots, call.has_initial_state
    flags = {
        Flags.BETA_FLOAT: beta.dtype is torch.float32,
        Flags.BETA_LOGITS: tokens.beta_logits,
        Flags.L2_NORM: tokens.l2norm,
        Flags.RAW_GATE: gate.kind != "log_decay",
        Flags.STATE_V_FIRST: call.state_v_first,
        Flags.INITIAL_FLOAT: _has_dtype(initial, torch.float32),
        Flags.FINAL_FLOAT: _has_dtype(final, torch.float32),
        Flags.CHECKPOINT_FLOAT: _has_dtype(checkpoint_pool, torch.float32),
        Flags.READ_SLOTS_64: _has_dtype(read_slots, torch.int64),
        Flags.WRITE_SLOTS_64: _has_dtype(write_slots, torch.int64),
        Flags.INITIAL_FLAG_32: _has_dtype(has_initial, torch.int32),
        Flags.ORDERED: ordered,
        Flags.SCHEDULED: scheduled,
        Flags.VECTOR_STATES: vectors,
        Flags.GATE_FLOAT: tokens.g.dtype is torch.float32,
    }
    return Constants(
        beta_token_stride=beta.stride(0),
        beta_head_stride=beta.stride(1),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        initial_stride=_first_stride(initial),
        final_stride=_first_stride(final),
        checkpoint_stride=_first_stride(checkpoint_pool),
        read_stride=_first_stride(read_slots),
        write_stride=_first_stride(write_slots),
        has_initial_stride=_first_stride(has_initial),
        tokens=tokens.count,
        segments=segments.count,
        value_heads=tokens.value_heads,
        group=tokens.value_heads // tokens.heads,
        initial_rows=0 if initial is None else initial.shape[0],
        final_rows=0 if final is None else final.shape[0],
        checkpoint_rows=0 if checkpoint_pool is None else checkpoint_pool.shape[0],
        pad_slot=call.pad_slot,
        parts=parts,
        flags=sum(bit for bit, on in flags.items() if on),
        scale=tokens.scale * params.SCALED_UP,
        beta_scale=tokens.beta_scale,
        lower_bound=gate.lower_bound or 0.0,
        checkpoints=_checkpoints(call),
    )


def _first_stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _has_dtype(tensor: Tensor | None, dtype: torch.dtype) -> bool:
    return tensor is not None and tensor.dtype is dtype


def _has(call: PrefillCall, name: str) -> bool:
    """Whether a call has the tensor `name`."""
    owner, _, field = name.rpartition(".")
    holder = operator.attrgetter(owner)(call) if owner else call
    return holder is not None and getattr(holder, field) is not None


def _pools(call: PrefillCall) -> tuple[Tensor | None, ...]:
    return call.initial, call.final, call.checkpoint_pool


def _maps(call: PrefillCall, keep: list[Tensor]) -> bytes:
    tokens = call.tokens
    if tokens.count == 0:
        return b""
    gate_blocks = 4 if tokens.g.dtype is torch.float32 else 2
    return (
        tensor_map(tokens.q, 2, keep)
        + tensor_map(tokens.k, 2, keep)
        + tensor_map(tokens.v, 1, keep)  # its halves may go to different CTAs
        + tensor_map(tokens.g, gate_blocks, keep)
    )


def _misplaced(conv: FusedConv | None) -> bool:
    """The weights of a convolution do not lie where the kernel reads a channel's four at once."""
    return conv is not None and conv.weight.data_ptr() % ALIGNMENT != 0


def _strided_rows(out: Tensor) -> bool:
    """The rows of an output do not all start at multiples of 16 bytes, or lie too far apart."""
    strides = [stride for extent, stride in zip(out.shape[:2], out.stride()[:2]) if extent > 1]
    return any(stride % 8 for stride in strides) or max(strides, default=0) >= _MOST_STRIDE


def _workers(chosen: Plan, device: int) -> int:
    """CTAs, or clusters of two, that run at once."""
    return multiprocessors(device) // (1 if chosen.form == "whole" else 2)


def _shares(call: PrefillCall, workers: int) -> bytes:
    """Who takes what, where the host knows the lengths."""
    host = call.segments.host
    return b"" if host is None else schedule.shares(host[1], call.tokens.value_heads, workers)


def _order(segments: Segments) -> bytes:
    """Launch order, longest first, where the host knows the lengths; empty if it does not matter."""
    count = segments.count
    if segments.host is None or not 1 < count <= ORDER_ENTRIES or segments.total == count * segments.max_length:
        return b""
    return np.argsort(-segments.host[1], kind="stable").astype(np.uint16).tobytes()
