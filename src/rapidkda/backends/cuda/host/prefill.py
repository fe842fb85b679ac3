"""Launch of csrc/prefill.cu and csrc/compose.cu for one validated call."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch
from torch import Tensor

from ....problem import GateKind, PrefillCall
from ....segments import Segments
from .. import compiler
from ..compiler import KernelSource, LoadedKernel
from .params import ORDER_ENTRIES, Argument, Flags, Params
from .plan import CHUNK, STATE_BYTES, Plan, plan_prefill
from .tensor_map import ALIGNMENT, tensor_map, tileable

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
    if segments.host is not None:
        total = int((-(-segments.host[1] // CHUNK)).sum())
    return plan_prefill(segments.count, total, longest, call.tokens.value_heads, sms)


def run(call: PrefillCall, forced: Plan | None = None) -> None:
    """Launch on the current stream. `forced` overrides the planner."""
    segments, tokens = call.segments, call.tokens
    if segments.count == 0:
        return
    device = tokens.q.device
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return run(call, forced)
    chosen = plan(call, multiprocessors(index)) if forced is None else forced
    bounded, gate_float = tokens.gate.kind == "bounded", tokens.g.dtype is torch.float32
    params, keep = _params(call)
    params.parts = chosen.parts
    out = _aligned_out(call.out)
    params.out, params.out_token_stride, params.out_head_stride = out.data_ptr(), out.stride(0), out.stride(1)
    order = _order(segments)
    if order:
        params.flags |= Flags.ORDERED
    maps = b"".join(_maps(call, keep)) if tokens.count else bytes(512)
    stream = torch.cuda.current_stream(index).cuda_stream
    units = segments.count * tokens.value_heads
    if chosen.form == "parallel":
        scratch = _scratch(call, 3 * STATE_BYTES * units * chosen.parts)
        params.transitions = scratch.data_ptr()
        params.starts = params.transitions + 2 * STATE_BYTES * units * chosen.parts
        argument = Argument(maps, params, order)
        transition = compiler.load(kernel("transition", bounded, gate_float), index)
        _launch(transition, (units * (chosen.parts - 1) * 2, 1, 1), argument, stream)
        _launch(compiler.load(COMPOSE, index), (_COMPOSE_BLOCKS, tokens.value_heads, segments.count), argument, stream)
        units *= chosen.parts
    else:
        argument = Argument(maps, params, order)
    form = "whole" if chosen.form == "whole" else "pair"
    main = compiler.load(kernel(form, bounded, gate_float), index)
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


def _params(call: PrefillCall) -> tuple[Params, list[Tensor]]:
    """Everything but the tensor maps, the output and the plan; and tensors that must outlive the launch."""
    tokens, segments = call.tokens, call.segments
    gate: GateKind = tokens.gate.kind
    flags = 0
    for condition, flag in (
        (tokens.beta.dtype is torch.float32, Flags.BETA_FLOAT),
        (tokens.beta_logits, Flags.BETA_LOGITS),
        (tokens.l2norm, Flags.L2_NORM),
        (gate != "log_decay", Flags.RAW_GATE),
        (call.state_v_first, Flags.STATE_V_FIRST),
    ):
        if condition:
            flags |= flag
    params = Params(
        beta=tokens.beta.data_ptr(),
        beta_token_stride=tokens.beta.stride(0),
        beta_head_stride=tokens.beta.stride(1),
        first_token=segments.first_token.data_ptr(),
        length=segments.length.data_ptr(),
        tokens=tokens.count,
        segments=segments.count,
        value_heads=tokens.value_heads,
        group=tokens.value_heads // tokens.heads,
        pad_slot=call.pad_slot,
        scale=tokens.scale,
        beta_scale=tokens.beta_scale,
        lower_bound=tokens.gate.lower_bound or 0.0,
    )
    keep = [_dense_table(segments.first_token), _dense_table(segments.length)]
    params.first_token, params.length = (table.data_ptr() for table in keep)
    if tokens.gate.A_log is not None:
        params.A_log = tokens.gate.A_log.data_ptr()
    if tokens.gate.dt_bias is not None:
        params.dt_bias = tokens.gate.dt_bias.data_ptr()
    vectors = call.state_v_first
    if call.initial is not None:
        params.initial, params.initial_stride, params.initial_rows = _pool(call.initial)
        flags |= Flags.INITIAL_FLOAT if call.initial.dtype is torch.float32 else 0
        vectors &= _vector_aligned(call.initial)
    if call.final is not None:
        params.final, params.final_stride, params.final_rows = _pool(call.final)
        flags |= Flags.FINAL_FLOAT if call.final.dtype is torch.float32 else 0
        vectors &= _vector_aligned(call.final)
    if call.read_slots is not None:
        params.read_slots, params.read_stride = call.read_slots.data_ptr(), call.read_slots.stride(0)
        flags |= Flags.READ_SLOTS_64 if call.read_slots.dtype is torch.int64 else 0
    if call.write_slots is not None:
        params.write_slots, params.write_stride = call.write_slots.data_ptr(), call.write_slots.stride(0)
        flags |= Flags.WRITE_SLOTS_64 if call.write_slots.dtype is torch.int64 else 0
    if call.has_initial_state is not None:
        params.has_initial = call.has_initial_state.data_ptr()
        params.has_initial_stride = call.has_initial_state.stride(0)
        flags |= Flags.INITIAL_FLAG_32 if call.has_initial_state.dtype is torch.int32 else 0
    if call.checkpoints is not None and call.checkpoint_pool is not None:
        tables = [_dense_table(t) for t in (call.checkpoints.begin, call.checkpoints.offset, call.checkpoints.slot)]
        keep += tables
        params.checkpoint_begin, params.checkpoint_offset, params.checkpoint_slot = (t.data_ptr() for t in tables)
        params.checkpoint_pool, params.checkpoint_stride, params.checkpoint_rows = _pool(call.checkpoint_pool)
        flags |= Flags.CHECKPOINT_FLOAT if call.checkpoint_pool.dtype is torch.float32 else 0
        vectors &= _vector_aligned(call.checkpoint_pool)
    if vectors:
        flags |= Flags.VECTOR_STATES
    params.flags = flags
    return params, keep


def _dense_table(table: Tensor) -> Tensor:
    return table if table.is_contiguous() else table.contiguous()


def _pool(pool: Tensor) -> tuple[int, int, int]:
    """Address, elements between slots, rows."""
    return pool.data_ptr(), pool.stride(0), pool.shape[0]


def _vector_aligned(pool: Tensor) -> bool:
    """Two neighbouring elements of a row may be moved at once."""
    return pool.data_ptr() % (2 * pool.element_size()) == 0 and pool.stride(0) % 2 == 0


def _maps(call: PrefillCall, keep: list[Tensor]) -> list[bytes]:
    tokens = call.tokens
    q, k, v, g = (tileable(x) for x in (tokens.q, tokens.k, tokens.v, tokens.g))
    keep += [q, k, v, g]
    return [
        tensor_map(q, 2),
        tensor_map(k, 2),
        tensor_map(v, 1),
        tensor_map(g, 4 if g.dtype is torch.float32 else 2),
    ]


def _aligned_out(out: Tensor) -> Tensor:
    """`out`, or a dense stand-in with the same values where its rows do not start at multiples of 16 bytes."""
    strides = [stride for extent, stride in zip(out.shape[:2], out.stride()[:2]) if extent > 1]
    if out.data_ptr() % ALIGNMENT == 0 and all(stride * out.element_size() % ALIGNMENT == 0 for stride in strides):
        return out
    return out.clone(memory_format=torch.contiguous_format)


def _order(segments: Segments) -> bytes:
    """Launch order, longest first, where the host knows the lengths; empty if it does not matter."""
    if segments.host is None or not 1 < segments.count <= ORDER_ENTRIES:
        return b""
    length = segments.host[1]
    if int(length.min()) == segments.max_length:
        return b""
    return np.argsort(-length, kind="stable").astype(np.uint16).tobytes()


def _scratch(call: PrefillCall, needed: int) -> Tensor:
    if call.workspace is not None and call.workspace.shape[0] >= needed:
        return call.workspace
    return torch.empty(needed, dtype=torch.uint8, device=call.tokens.q.device)
