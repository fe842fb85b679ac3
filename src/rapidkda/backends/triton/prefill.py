"""Prefill: three launches (tiles, preparation, scan), five where sequences are cut into parts.

Nothing here reads a device tensor, and no size is a compile-time constant: a call of a new length compiles nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import PrefillCall
from . import config, launch, plan
from .prepare import prepare_kernel
from .scan import compose_kernel, scan_kernel
from .tiles import tiles_kernel

WHOLE, TRANSITIONS, RESUME = 0, 1, 2  # as in scan.py
COMPOSE_ROWS = 16
TABLE_BLOCK = 128


def prefill(call: PrefillCall) -> None:
    """`Backend.prefill`."""
    tokens, segments = call.tokens, call.segments
    if segments.count == 0:
        return
    heads, key_dim, value_dim = tokens.value_heads, tokens.key_dim, tokens.value_dim
    precise = tokens.q.dtype == torch.float32
    where = config.machine(tokens.q.device)
    full = segments.count * heads >= 2 * where.units
    choice = config.choose(where, key_dim, value_dim, precise, _chunk_limit(call), full)
    chunk = choice.chunk
    tiles = plan.max_tiles(tokens.count, segments.count, chunk)
    blocks = (value_dim // choice.value_block, key_dim // choice.value_block)
    cut = plan.cut(segments, tokens.count, heads, chunk, blocks, where.units)
    record = plan.record_bytes(chunk, key_dim, value_dim, precise)
    layout = plan.Layout.of(tiles, cut.parts, segments.count, heads, key_dim, value_dim, record)
    workspace = _workspace(call, layout.total)
    table, near, fine, full_precision = (
        workspace.view(dtype) for dtype in (torch.int32, torch.bfloat16, torch.float16, torch.float32)
    )
    lengths = segments.length.stride(0)

    tiles_kernel[(segments.count + 1,)](
        segments.length, table, lengths, segments.count, tiles, cut.parts, cut.part_tiles,
        C=chunk, BLOCK=TABLE_BLOCK, num_warps=4,
    )  # fmt: skip
    if tiles > 0 and tokens.count > 0:
        prepare_kernel[(tiles * heads,)](
            *launch.inputs(tokens), segments.first_token, segments.length, table, near, fine, full_precision,
            segments.count, tiles, layout.records // plan.ALIGNMENT, heads, *launch.scalars(tokens),
            *launch.strides(tokens), segments.first_token.stride(0), lengths,
            C=chunk, RECORD=record // plan.ALIGNMENT, PRECISE=precise, PRECISION=choice.precision,
            **launch.options(tokens), num_warps=choice.prepare_warps,
        )  # fmt: skip

    def scan(passes: int, row_blocks: int, count: int) -> None:
        checkpoints = call.checkpoints if call.checkpoint_pool is not None and passes != TRANSITIONS else None
        scan_kernel[(row_blocks, heads, count)](
            table, near, fine, full_precision, call.out, segments.first_token, segments.length,
            call.initial, call.final if passes != TRANSITIONS else None,
            call.read_slots, call.write_slots, call.has_initial_state,
            None if checkpoints is None else checkpoints.begin,
            None if checkpoints is None else checkpoints.offset,
            None if checkpoints is None else checkpoints.slot,
            None if checkpoints is None else call.checkpoint_pool,
            segments.count, tiles, layout.records // plan.ALIGNMENT,
            layout.carries // plan.ALIGNMENT, layout.transitions // plan.ALIGNMENT, heads,
            _rows(call.initial), _rows(call.final), _rows(call.checkpoint_pool), call.pad_slot,
            call.out.stride(0), call.out.stride(1), segments.first_token.stride(0), lengths,
            _stride(call.initial), _stride(call.final), _stride(call.read_slots), _stride(call.write_slots),
            _stride(call.has_initial_state), _stride(None if checkpoints is None else checkpoints.begin),
            _stride(call.checkpoint_pool),
            K=key_dim, V=value_dim, C=chunk, VB=choice.value_block, RECORD=record // plan.ALIGNMENT,
            V_FIRST=call.state_v_first, PASS=passes, PRECISE=precise, PRECISION=choice.precision,
            STAGES=choice.stages, num_warps=choice.scan_warps,
        )  # fmt: skip

    if cut.parts == 0:
        scan(WHOLE, blocks[0], segments.count)
        return
    scan(TRANSITIONS, blocks[0] + blocks[1], cut.parts)
    compose_kernel[(value_dim // COMPOSE_ROWS, heads, segments.count)](
        table, full_precision, segments.count,
        layout.carries // plan.ALIGNMENT, layout.transitions // plan.ALIGNMENT, heads,
        K=key_dim, V=value_dim, VB=COMPOSE_ROWS, PRECISION=choice.precision, STAGES=2, num_warps=4,
    )  # fmt: skip
    scan(RESUME, blocks[0], cut.parts)


def _chunk_limit(call: PrefillCall) -> int:
    """Chunks of 32 tokens where no state is exported inside one, as far as the host knows."""
    if call.checkpoints is None or call.checkpoint_pool is None:
        return 32
    host = call.checkpoints.host
    return 32 if host is not None and not (host[1] % 32).any() else 16


def _workspace(call: PrefillCall, size: int) -> Tensor:
    if call.workspace is None:
        return torch.empty(size, dtype=torch.uint8, device=call.tokens.q.device)
    return call.workspace[:size]


def _rows(pool: Tensor | None) -> int:
    return 0 if pool is None else pool.shape[0]


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
