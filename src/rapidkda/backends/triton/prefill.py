"""Prefill: three launches (tiles, preparation, scan), five where sequences are cut into parts.

Nothing here reads a device tensor, and no size is a compile-time constant: a call of a new length compiles nothing.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...problem import PrefillCall
from . import config, launch, plan
from .compose import compose_kernel
from .prepare import prepare_kernel
from .scan import scan_kernel
from .tiles import tiles_kernel

WHOLE, FIRST, SECOND, SHARED = 0, 1, 2, 3  # as in scan.py
FORMS = WHOLE, FIRST, SHARED  # of a scan
COMPOSE_ROWS = 16
TABLE_BLOCK = 128
GLUON_REGISTERS = 128  # of a thread of the preparation: for as many programs as its shared memory allows
VIEWS = (torch.int32, torch.bfloat16, torch.float32)  # the workspace: table, and records in two dtypes


_tiles = launch.Launcher(tiles_kernel)
_prepare = launch.Launcher(prepare_kernel)
_scan = launch.Launcher(scan_kernel)
_compose = launch.Launcher(compose_kernel)


@functools.cache
def sm90_scan() -> launch.Launcher:
    from .scan_sm90 import scan_kernel

    return launch.Launcher(scan_kernel)


@functools.cache
def sm90_prepare() -> launch.Launcher:
    from .prepare_sm90 import prepare_kernel

    return launch.Launcher(prepare_kernel)


def prefill(call: PrefillCall) -> None:
    """`Backend.prefill`."""
    if call.segments.count == 0:
        return
    prepared = call.memo.get("triton")
    if prepared is None:
        prepared = call.memo["triton"] = Prepared(call)
    prepared.run(call)


class Prepared:
    """What calls of a kind share: how segments are cut, where everything lies in the workspace, and the launches."""

    def __init__(self, call: PrefillCall):
        tokens, segments = call.tokens, call.segments
        device, heads, key_dim, value_dim = tokens.q.device, tokens.value_heads, tokens.key_dim, tokens.value_dim
        precise = tokens.q.dtype == torch.float32
        where = config.machine(device)
        self.units = where.units
        self.choice = choice = config.choose(where, key_dim, value_dim, precise, tokens.gate.kind == "bounded")
        self.blocks = value_dim // choice.value_block, key_dim // choice.value_block
        costs = plan.SM90 if choice.gluon else plan.PORTABLE
        self.cut = plan.cut(segments, tokens.count, heads, self.blocks, where.units, costs)
        self.shares = 0
        if not self.cut.parts:
            self.shares = plan.shares(segments, tokens.count, heads, self.blocks[0], where.units, costs)
        self.form = FIRST if self.cut.parts else SHARED if self.shares else WHOLE
        self.may_share = costs.piece > 0
        tiles = plan.max_tiles(tokens.count, segments.count)
        record = plan.record_bytes(key_dim, precise)
        layout = plan.Layout.of(tiles, self.cut.parts, self.shares, segments.count, heads, key_dim, value_dim, record)
        flags = self.shares * self.blocks[0]
        self.scratch_bytes = layout.total
        self.record_units = record // plan.ALIGNMENT
        self.starts = [x // plan.ALIGNMENT for x in (layout.records, layout.carries, layout.transitions)]
        self._tiles = _tiles.bind(
            device,
            (segments.count + 1, 1, 1),
            (tokens.count, segments.count, tiles, self.cut.later, flags, self.cut.part_tiles),
            (segments.first_token.stride(0), segments.length.stride(0)),
            (plan.CHUNK, TABLE_BLOCK),
            num_warps=4,
            views=VIEWS[:1],
        )
        self._tiles_of = plan.tile_grid(tiles, heads), plan.tile_table(segments.count, self.cut.later, flags), tiles
        self._compose = _compose.bind(
            device,
            (value_dim // COMPOSE_ROWS, heads, segments.count),
            (segments.count, *self.starts[1:], heads),
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
            views=(VIEWS[0], VIEWS[2]),
        )
        # Gluon's copies take 16 bytes at a time, as Triton must be able to tell from strides and addresses
        self._wide_values = all(stride % 16 == 0 for stride in tokens.v.stride()[:2])
        keys = tokens.q, tokens.k, tokens.g
        self._wide_keys = all(stride % 16 == 0 for x in keys for stride in x.stride()[:2])
        self._steps = launch.Steps()
        self._prepares: dict[bool, launch.Launch] = {}  # by language, as they are needed
        self._scans: dict[tuple[int, bool], launch.Launch] = {}  # by pass and language, as they are needed

    def run(self, call: PrefillCall) -> None:
        """Launch a call of this kind."""
        tokens, segments = call.tokens, call.segments
        workspace = _workspace(call, self.scratch_bytes)
        steps: list[launch.Step] = [(self._tiles, (workspace,), (segments.first_token, segments.length))]
        if tokens.count > 0:
            steps.append((self._prepare(call), (*launch.inputs(tokens, values=False), *[workspace] * 3), ()))
        if self._steps.run(call, [*steps, *self._form(call, self.form, workspace)]):
            # The first call of its kind: another length may take another form, and must not compile then
            for form in FORMS if self.may_share else FORMS[:2]:
                for step, data, tables in self._form(call, form, workspace) if form != self.form else ():
                    step(data, tables, compile_only=True)

    def _form(self, call: PrefillCall, form: int, workspace: Tensor) -> list[launch.Step]:
        """The scan of segments that are whole (WHOLE, SHARED) or cut into parts (FIRST)."""
        if form != FIRST:
            return [self._scan(call, form, workspace)]
        compose: launch.Step = (self._compose, (workspace, workspace), ())
        return [self._scan(call, FIRST, workspace), compose, self._scan(call, SECOND, workspace)]

    def _prepare(self, call: PrefillCall) -> launch.Launch:
        tokens = call.tokens
        gluon = self.choice.gluon and self._wide_keys and tokens.g.dtype == tokens.q.dtype
        gluon = gluon and (tokens.q.data_ptr() | tokens.k.data_ptr() | tokens.g.data_ptr()) % 16 == 0
        bound = self._prepares.get(gluon)
        if bound is None:
            bound = self._prepares[gluon] = self._bind_prepare(call, gluon)
        return bound

    def _bind_prepare(self, call: PrefillCall, gluon: bool) -> launch.Launch:
        tokens, choice = call.tokens, self.choice
        grid, table, tiles = self._tiles_of
        kernel = sm90_prepare() if gluon else _prepare
        return kernel.bind(
            tokens.q.device,
            grid,
            (table, tiles, self.starts[0], *launch.scalars(tokens)),
            launch.strides(tokens, values=False),
            (
                *launch.constants(tokens)[:-1],
                tokens.value_heads // tokens.heads,
                choice.slice,
                self.record_units,
                tokens.q.dtype == torch.float32,
                choice.precision,
            ),
            num_warps=choice.prepare_warps,
            views=(*[None] * len(launch.inputs(tokens, values=False)), torch.int64, *VIEWS[1:]),
            registers=GLUON_REGISTERS if gluon else choice.prepare_registers,
        )

    def _scan(self, call: PrefillCall, passes: int, workspace: Tensor) -> launch.Step:
        gluon = self.choice.gluon and self._wide_values and call.tokens.v.data_ptr() % 16 == 0
        bound = self._scans.get((passes, gluon))
        if bound is None:
            bound = self._scans[passes, gluon] = self._bind_scan(call, passes, gluon)
        exported = _exported(call)
        data = (*[workspace] * 3, call.tokens.v, call.out, call.initial, call.final, exported)
        return bound, data, _tables(call, exported)

    def _bind_scan(self, call: PrefillCall, passes: int, gluon: bool) -> launch.Launch:
        tokens, segments, choice = call.tokens, call.segments, self.choice
        exported = _exported(call)
        heads = tokens.value_heads
        grid = (self.blocks[0], heads, segments.count if passes == WHOLE else max(self.cut.later, 1))
        if passes == SHARED:
            grid = (self.blocks[0], max(self.shares, 1), 1)
        early = 0
        if passes == FIRST:
            # First parts start as the last programs that find a multiprocessor to themselves; what comes after them
            # shares one with other programs of middle parts, whose tiles take less time.
            starting, middle = heads * segments.count * self.blocks[0], heads * self.cut.middle * sum(self.blocks)
            early = min(max(self.units - starting, 0), middle)
            grid = (starting + middle, 1, 1)
        kernel = sm90_scan() if gluon else _scan
        return kernel.bind(
            tokens.q.device,
            grid,
            (
                tokens.count,
                segments.count,
                *self.starts,
                heads,
                early,
                self.cut.first_eighths,
                launch.rows(call.initial),
                launch.rows(call.final),
                launch.rows(exported),
                call.pad_slot,
            ),
            (
                *tokens.v.stride()[:2],
                *call.out.stride()[:2],
                segments.first_token.stride(0),
                segments.length.stride(0),
                launch.stride(call.initial),
                launch.stride(call.final),
                *[launch.stride(x) for x in _tables(call, exported)[2:]],
                launch.stride(exported),
            ),
            (
                tokens.key_dim,
                tokens.value_dim,
                plan.CHUNK,
                choice.value_block,
                self.record_units,
                call.state_v_first,
                passes,
                tokens.q.dtype == torch.float32,
                choice.precision,
                choice.stages,
            ),
            num_warps=choice.scan_warps,
            registers=choice.scan_registers if gluon else None,
            views=VIEWS,
        )


def _exported(call: PrefillCall) -> Tensor | None:
    """The pool of the checkpoints, if there are any."""
    return call.checkpoint_pool if call.checkpoints is not None else None


def _tables(call: PrefillCall, exported: Tensor | None) -> tuple[Tensor | None, ...]:
    """Tables of a scan: segments, slots, and the checkpoints if it exports any."""
    begin = offset = slot = None
    if exported is not None and call.checkpoints is not None:
        begin, offset, slot = call.checkpoints.begin, call.checkpoints.offset, call.checkpoints.slot
    segments = call.segments
    return (
        segments.first_token,
        segments.length,
        call.read_slots,
        call.write_slots,
        call.has_initial_state,
        begin,
        offset,
        slot,
    )


def _workspace(call: PrefillCall, size: int) -> Tensor:
    if call.workspace is None:
        return torch.empty(size, dtype=torch.uint8, device=call.tokens.q.device)
    return call.workspace
