"""Prefill: three launches (tiles, preparation, scan), five where sequences are cut into parts.

Nothing here reads a device tensor, and no size is a compile-time constant: a call of a new length compiles nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import PrefillCall
from . import config, launch, plan
from .compose import compose_kernel
from .prepare import prepare_kernel
from .scan import scan_kernel
from .tiles import tiles_kernel

WHOLE, TRANSITIONS, RESUME = 0, 1, 2  # as in scan.py
COMPOSE_ROWS = 16
TABLE_BLOCK = 128


_tiles = launch.Launcher(tiles_kernel)
_prepare = launch.Launcher(prepare_kernel)
_scan = launch.Launcher(scan_kernel)
_compose = launch.Launcher(compose_kernel)


def prefill(call: PrefillCall) -> None:
    """`Backend.prefill`."""
    tokens, segments = call.tokens, call.segments
    if segments.count == 0:
        return
    heads, key_dim, value_dim = tokens.value_heads, tokens.key_dim, tokens.value_dim
    precise = tokens.q.dtype == torch.float32
    where = config.machine(tokens.q.device)
    choice = config.choose(where, key_dim, value_dim, precise)
    chunk = plan.CHUNK
    tiles = plan.max_tiles(tokens.count, segments.count)
    blocks = (value_dim // choice.value_block, key_dim // choice.value_block)
    cut = plan.cut(segments, tokens.count, heads, blocks, where.units)
    record = plan.record_bytes(key_dim, value_dim, precise)
    layout = plan.Layout.of(tiles, cut.parts, segments.count, heads, key_dim, value_dim, record)
    workspace = _workspace(call, layout.total)
    table, near, fine, full_precision = (
        workspace.view(dtype) for dtype in (torch.int32, torch.bfloat16, torch.float16, torch.float32)
    )
    first_token, length = segments.first_token, segments.length
    record_start = layout.records // plan.ALIGNMENT
    carry_start, transition_start = layout.carries // plan.ALIGNMENT, layout.transitions // plan.ALIGNMENT
    record_units = record // plan.ALIGNMENT

    _tiles(
        (segments.count + 1, 1, 1),
        (table,),
        (first_token, length),
        (segments.count, tiles, cut.parts, cut.part_tiles),
        (first_token.stride(0), length.stride(0)),
        (chunk, TABLE_BLOCK),
        num_warps=4,
    )
    if tokens.count > 0:
        _prepare(
            (tiles * heads, 1, 1),
            (*launch.inputs(tokens), table, near, fine, full_precision),
            (),
            (
                2 * (segments.count + 1) + cut.parts,
                tiles,
                record_start,
                heads,
                heads // tokens.heads,
                *launch.scalars(tokens),
            ),
            launch.strides(tokens),
            (*launch.constants(tokens), choice.slice, record_units, precise, choice.precision),
            num_warps=choice.prepare_warps,
        )

    def scan(passes: int, row_blocks: int, count: int, compile_only: bool = False) -> bool:
        final = call.final if passes != TRANSITIONS else None
        exported = call.checkpoint_pool if passes != TRANSITIONS and call.checkpoints is not None else None
        begin = offset = slot = None
        if exported is not None and call.checkpoints is not None:
            begin, offset, slot = call.checkpoints.begin, call.checkpoints.offset, call.checkpoints.slot
        return _scan(
            (row_blocks, heads, count),
            (table, near, fine, full_precision, call.out, call.initial, final, exported),
            (first_token, length, call.read_slots, call.write_slots, call.has_initial_state, begin, offset, slot),
            (
                segments.count,
                record_start,
                carry_start,
                transition_start,
                heads,
                launch.rows(call.initial),
                launch.rows(call.final),
                launch.rows(exported),
                call.pad_slot,
            ),
            (
                *call.out.stride()[:2],
                first_token.stride(0),
                length.stride(0),
                launch.stride(call.initial),
                launch.stride(call.final),
                launch.stride(call.read_slots),
                launch.stride(call.write_slots),
                launch.stride(call.has_initial_state),
                launch.stride(begin),
                launch.stride(offset),
                launch.stride(slot),
                launch.stride(exported),
            ),
            (
                key_dim,
                value_dim,
                chunk,
                choice.value_block,
                record_units,
                call.state_v_first,
                passes,
                precise,
                choice.precision,
                choice.stages,
            ),
            num_warps=choice.scan_warps,
            compile_only=compile_only,
        )

    def run_whole(compile_only: bool = False) -> bool:
        return scan(WHOLE, blocks[0], segments.count, compile_only)

    def run_parts(compile_only: bool = False) -> bool:
        count = max(cut.parts, 1)
        scan(TRANSITIONS, blocks[0] + blocks[1], count, compile_only)
        _compose(
            (value_dim // COMPOSE_ROWS, heads, segments.count),
            (table, full_precision),
            (),
            (segments.count, carry_start, transition_start, heads),
            (),
            (
                key_dim,
                value_dim,
                COMPOSE_ROWS,
                min(key_dim, 8192 // key_dim),
                choice.precision,
                min(choice.stages, 2),
            ),
            num_warps=4,
            compile_only=compile_only,
        )
        return scan(RESUME, blocks[0], count, compile_only)

    run, other = (run_parts, run_whole) if cut.parts else (run_whole, run_parts)
    if run():  # the first call of its kind: another length may take the other form, and must not compile then
        other(compile_only=True)


def _workspace(call: PrefillCall, size: int) -> Tensor:
    if call.workspace is None:
        return torch.empty(size, dtype=torch.uint8, device=call.tokens.q.device)
    return call.workspace[:size]
