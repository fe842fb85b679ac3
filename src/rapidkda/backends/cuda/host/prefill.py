"""Launch of csrc/prefill.cu and csrc/compose.cu for one validated call."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch
from torch import Tensor

from ....problem import PrefillCall
from ....segments import Segments
from .. import compiler
from ..compiler import KernelSource, LoadedKernel
from .params import ORDER_ENTRIES, Argument, Flags, Params
from .plan import CHUNK, STATE_BYTES, Plan, plan_prefill
from .tensor_map import ALIGNMENT, tensor_map

COMPOSE = KernelSource("compose.cu", "compose")
_COMPOSE_BLOCKS = 16  # of 8 state rows
_FORMS = {"whole": "kWhole", "pair": "kPair", "transition": "kTransition"}


@functools.cache
def kernel(form: str, bounded: bool, gate_float: bool) -> KernelSource:
    """The prefill kernel of a form (`whole`, `pair`, `transition`), gate kind and dtype of g."""
    macros = {
        "KDA_FORM": _FORMS[form],
        "KDA_CLUSTER": str(int(form != "whole")),
        "KDA_BOUNDED": str(bounded).lower(),
        "KDA_GATE_FLOAT": str(gate_float).lower(),
    }
    return KernelSource("prefill.cu", "prefill", tuple(macros.items()))


def kernels() -> list[KernelSource]:
    """Every kernel that a prefill call can need."""
    return [*itertools.starmap(kernel, itertools.product(_FORMS, (True, False), (True, False))), COMPOSE]


def plan(call: PrefillCall, sms: int) -> Plan:
    """The form that the cost model chooses for a call."""
    segments = call.segments
    longest = -(-segments.max_length // CHUNK)
    total = segments.count * longest
    if segments.total >= 0:
        total = min(total, -(-segments.total // CHUNK) + segments.count)  # at most one partial chunk a segment
    return plan_prefill(segments.count, total, longest, call.tokens.value_heads, sms)


def run(call: PrefillCall, forced: Plan | None = None) -> None:
    """Launch on the current stream. `forced` overrides the planner."""
    segments, tokens = call.segments, call.tokens
    if segments.count == 0:
        return
    index = tokens.q.device.index
    current = torch.cuda.current_device()
    if index is None:
        index = current
    elif index != current:
        with torch.cuda.device(index):
            return run(call, forced)
    chosen = plan(call, multiprocessors(index)) if forced is None else forced
    bounded, gate_float = tokens.gate.kind == "bounded", tokens.g.dtype is torch.float32
    out = _aligned_out(call.out)
    order = _order(segments)
    keep: list[Tensor] = []  # copies that must outlive the launches
    maps = _maps(call, keep)
    stream = torch._C._cuda_getCurrentRawStream(index)  # a tenth of the time of current_stream().cuda_stream
    units = segments.count * tokens.value_heads
    form = "whole" if chosen.form == "whole" else "pair"
    main = compiler.load(kernel(form, bounded, gate_float), index)
    if chosen.form == "parallel":
        scratch = _scratch(call, 3 * STATE_BYTES * units * chosen.parts)
        transitions = scratch.data_ptr()
        starts = transitions + 2 * STATE_BYTES * units * chosen.parts
        argument = Argument(maps, _params(call, keep, out, order, chosen.parts, transitions, starts), order)
        transition = compiler.load(kernel("transition", bounded, gate_float), index)
        compose = compiler.load(COMPOSE, index)
        _launch(transition, (units * (chosen.parts - 1) * transition.cluster, 1, 1), argument, stream)
        _launch(compose, (_COMPOSE_BLOCKS, tokens.value_heads, segments.count), argument, stream)
        units *= chosen.parts
    else:
        argument = Argument(maps, _params(call, keep, out, order), order)
    _launch(main, (units * main.cluster, 1, 1), argument, stream)
    if out is not call.out:
        call.out.copy_(out)


@functools.cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of the device of that ordinal."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch(loaded: LoadedKernel, grid: tuple[int, int, int], argument: Argument, stream: int) -> None:
    from cuda.bindings import driver  # type: ignore[import-untyped]

    compiler.check(
        driver.cuLaunchKernel(
            loaded.function, *grid, loaded.threads, 1, 1, loaded.shared_bytes, stream, argument.address, 0
        )
    )


def _params(
    call: PrefillCall,
    keep: list[Tensor],
    out: Tensor,
    order: bytes,
    parts: int = 1,
    transitions: int = 0,
    starts: int = 0,
) -> Params:
    tokens, segments, gate = call.tokens, call.segments, call.tokens.gate
    beta = tokens.beta
    flags = Flags.ORDERED if order else 0
    if beta.dtype is torch.float32:
        flags |= Flags.BETA_FLOAT
    if tokens.beta_logits:
        flags |= Flags.BETA_LOGITS
    if tokens.l2norm:
        flags |= Flags.L2_NORM
    if gate.kind != "log_decay":
        flags |= Flags.RAW_GATE
    if call.state_v_first:
        flags |= Flags.STATE_V_FIRST
    vectors = call.state_v_first
    initial, final, checkpoint_pool = call.initial, call.final, call.checkpoint_pool
    if initial is not None:
        flags |= Flags.INITIAL_FLOAT if initial.dtype is torch.float32 else 0
        vectors &= _vector_aligned(initial)
    if final is initial:
        flags |= Flags.FINAL_FLOAT if flags & Flags.INITIAL_FLOAT else 0
    elif final is not None:
        flags |= Flags.FINAL_FLOAT if final.dtype is torch.float32 else 0
        vectors &= _vector_aligned(final)
    checkpoints = (0, 0, 0)
    if call.checkpoints is not None and checkpoint_pool is not None:
        checkpoints = (
            _table(call.checkpoints.begin, keep),
            _table(call.checkpoints.offset, keep),
            _table(call.checkpoints.slot, keep),
        )
        flags |= Flags.CHECKPOINT_FLOAT if checkpoint_pool.dtype is torch.float32 else 0
        vectors &= _vector_aligned(checkpoint_pool)
    if vectors:
        flags |= Flags.VECTOR_STATES
    read_slots, write_slots, has_initial = call.read_slots, call.write_slots, call.has_initial_state
    if read_slots is not None and read_slots.dtype is torch.int64:
        flags |= Flags.READ_SLOTS_64
    if write_slots is not None and write_slots.dtype is torch.int64:
        flags |= Flags.WRITE_SLOTS_64
    if has_initial is not None and has_initial.dtype is torch.int32:
        flags |= Flags.INITIAL_FLAG_32
    value_heads = tokens.value_heads
    return Params(
        beta=beta.data_ptr(),
        A_log=_address(gate.A_log),
        dt_bias=_address(gate.dt_bias),
        out=out.data_ptr(),
        initial=_address(initial),
        final=_address(final),
        checkpoint_pool=_address(checkpoint_pool),
        first_token=_table(segments.first_token, keep),
        length=_table(segments.length, keep),
        read_slots=_address(read_slots),
        write_slots=_address(write_slots),
        has_initial=_address(has_initial),
        checkpoint_begin=checkpoints[0],
        checkpoint_offset=checkpoints[1],
        checkpoint_slot=checkpoints[2],
        transitions=transitions,
        starts=starts,
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
        value_heads=value_heads,
        group=value_heads // tokens.heads,
        initial_rows=0 if initial is None else initial.shape[0],
        final_rows=0 if final is None else final.shape[0],
        checkpoint_rows=0 if checkpoint_pool is None else checkpoint_pool.shape[0],
        pad_slot=call.pad_slot,
        parts=parts,
        flags=flags,
        scale=tokens.scale,
        beta_scale=tokens.beta_scale,
        lower_bound=gate.lower_bound or 0.0,
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _first_stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def _table(table: Tensor, keep: list[Tensor]) -> int:
    """Address of a dense int32 table."""
    if not table.is_contiguous():
        table = table.contiguous()
        keep.append(table)
    return table.data_ptr()


def _vector_aligned(pool: Tensor) -> bool:
    """Two neighbouring elements of a row may be moved at once."""
    return pool.data_ptr() % 8 == 0 and pool.stride(0) % 2 == 0


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


def _aligned_out(out: Tensor) -> Tensor:
    """`out`, or a dense stand-in with the same values where its rows do not start at multiples of 16 bytes."""
    if out.data_ptr() % ALIGNMENT == 0 and not any(
        extent > 1 and stride % 8 for extent, stride in zip(out.shape[:2], out.stride()[:2])
    ):
        return out
    return out.clone(memory_format=torch.contiguous_format)


def _order(segments: Segments) -> bytes:
    """Launch order, longest first, where the host knows the lengths; empty if it does not matter."""
    count = segments.count
    if segments.host is None or not 1 < count <= ORDER_ENTRIES or segments.total == count * segments.max_length:
        return b""
    return np.argsort(-segments.host[1], kind="stable").astype(np.uint16).tobytes()


def _scratch(call: PrefillCall, needed: int) -> Tensor:
    if call.workspace is not None and call.workspace.shape[0] >= needed:
        return call.workspace
    return torch.empty(needed, dtype=torch.uint8, device=call.tokens.q.device)
