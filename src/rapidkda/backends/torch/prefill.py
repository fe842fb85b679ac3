"""Prefill of any number of segments: which chunks run together, and states in and out of pools.

Segments are sorted by length and taken in groups; a group's chunks with the same index run as one batch, and a segment
leaves the batch when its chunks are done. The token-parallel part runs over blocks of consecutive chunk indices, so
that temporaries stay within a cache whatever the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...problem import PrefillCall, Tokens
from ...segments import Checkpoints, Segments
from . import chunk, gates, pools
from .scratch import Scratch

CPU_STATES = 64  # states [K, V] of a group: few enough to stay in a CPU's second-level cache
DEVICE_STATES = 4096
CPU_BLOCK = 1 << 18  # elements of one [M, C, K] temporary
DEVICE_BLOCK = 1 << 22


@dataclass(slots=True, eq=False)
class Block:
    """Consecutive chunk indices of one group, chunk index first, then segment."""

    alive: list[int]  # segments in each chunk index
    token: np.ndarray  # int64 [R, C] source rows; rows past a segment's end repeat its last token
    valid: np.ndarray  # bool [R, C]
    member: np.ndarray  # int64 [R] index into the group

    def span(self) -> slice | None:
        """The token range, if these are whole chunks one after another."""
        first = int(self.token[0, 0])
        last = first + self.token.size
        dense = self.valid.all() and np.array_equal(self.token[:, 0], np.arange(first, last, chunk.CHUNK))
        return slice(first, last) if dense else None


@dataclass(slots=True, eq=False)
class Group:
    """Segments that run as one batch, longest first."""

    segments: np.ndarray  # int64 [n] indices into the segment table
    first: np.ndarray
    length: np.ndarray

    def blocks(self, rows: int) -> Iterator[Block]:
        """Blocks of at most `rows` chunks, but at least one chunk index each."""
        chunks = -(-self.length // chunk.CHUNK)
        steps = int(chunks[0])
        alive = np.searchsorted(-chunks, -np.arange(steps), side="left")  # segments with more chunks than the index
        start = 0
        while start < steps:
            stop = start + max(1, int(np.searchsorted(np.cumsum(alive[start:]), rows, side="right")))
            counts = alive[start:stop]
            index = np.repeat(np.arange(start, start + len(counts)), counts)
            member = np.concatenate([np.arange(count) for count in counts])
            begin = index * chunk.CHUNK
            left = self.length[member] - begin
            lane = np.arange(chunk.CHUNK)
            token = (self.first[member] + begin)[:, None] + np.minimum(lane, left[:, None] - 1)
            yield Block(counts.tolist(), token, lane < left[:, None], member)
            start = stop


def groups(segments: Segments, value_heads: int, device: torch.device) -> list[Group]:
    """All non-empty segments."""
    first, length = segments.host_values()
    order = np.argsort(-length, kind="stable")
    order = order[: int(np.count_nonzero(length))]
    size = max(1, (CPU_STATES if device.type == "cpu" else DEVICE_STATES) // value_heads)
    return [
        Group(part, first[part], length[part]) for part in (order[i : i + size] for i in range(0, len(order), size))
    ]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def load(tokens: Tokens, block: Block, source: slice | Tensor, scratch: Scratch) -> chunk.Step:
    """Activate and prepare the chunks of a block, whose rows of the token axis are `source`."""
    rows, size = block.token.shape
    heads, key_dim, group = tokens.heads, tokens.key_dim, tokens.value_heads // tokens.heads
    device = tokens.q.device

    def take(x: Tensor) -> Tensor:
        """x [T, h, ...] to a view or copy [R, h, C, ...]."""
        taken = x[source] if isinstance(source, slice) else x.index_select(0, source)
        return taken.view(rows, size, *taken.shape[1:]).transpose(1, 2)

    k, q = take(tokens.k).to(scratch.dtype), take(tokens.q).to(scratch.dtype)
    k_scale = gates.inverse_norm(k) if tokens.l2norm else 1.0
    q_scale = gates.inverse_norm(q, tokens.scale) if tokens.l2norm else tokens.scale
    if scratch.reuse:
        kq = scratch.buffer("kq", rows, heads, size, 2, key_dim)
        torch.mul(k, k_scale, out=kq[:, :, :, 0])
        torch.mul(q, q_scale, out=kq[:, :, :, 1])
    else:
        kq = torch.stack([k * k_scale, q * q_scale], dim=3)
    if group > 1:
        kq = kq.repeat_interleave(group, dim=1)
    g = gates.log_decay(tokens.gate, scratch.convert("g", take(tokens.g)), in_place=scratch.reuse)
    b = gates.write_strength(take(tokens.beta).to(scratch.dtype), tokens.beta_logits, tokens.beta_scale)
    if not block.valid.all():
        valid = to_device(block.valid, device)
        g = torch.where(valid[:, None, :, None], g, 0.0)
        b = torch.where(valid[:, None], b, 0.0)
    g, b = g.contiguous().flatten(0, 1), b.contiguous().flatten(0, 1)
    return chunk.prepare(kq.flatten(0, 1), take(tokens.v), g, b, scratch)


Emit = Callable[[Block, Tensor], None]  # block, outputs [R, HV, C, V]
Boundary = Callable[[int, Tensor], None]  # chunks done, states [alive, HV, K, V]


def block_rows(tokens: Tokens) -> int:
    """Chunks that are prepared at once."""
    elements = CPU_BLOCK if tokens.q.device.type == "cpu" else DEVICE_BLOCK
    return max(1, elements // (tokens.value_heads * chunk.CHUNK * max(tokens.key_dim, tokens.value_dim)))


def run(tokens: Tokens, group: Group, state: Tensor, emit: Emit, boundary: Boundary | None, scratch: Scratch) -> None:
    """Run a group from `state` [n, HV, K, V] to its last states, in place."""
    value_heads, value_dim = tokens.value_heads, tokens.value_dim
    flat, alive, done = state.flatten(0, 1), 0, 0
    for block in group.blocks(block_rows(tokens)):
        span = block.span()
        source = to_device(block.token.reshape(-1), state.device) if span is None else span
        steps = load(tokens, block, source, scratch).split(block.alive)
        out = scratch.buffer("out", len(block.member), value_heads, chunk.CHUNK, value_dim)
        for count, step, target in zip(block.alive, steps, out.split(block.alive), strict=True):
            if count != alive:
                alive, current = count, flat[: count * value_heads]
                advance = chunk.Advance(alive, value_heads, value_dim, scratch)
            advance(step, current, target)
            done += 1
            if boundary is not None:
                boundary(done, state[:alive])
        emit(block, out)


def forward(tokens: Tokens, segments: Segments, initial: Tensor | None, state_v_first: bool) -> tuple[Tensor, Tensor]:
    """The differentiable form, out of place.

    `initial` is [N, HV, V, K] if state_v_first, else [N, HV, K, V], one row a segment, or None for zeros. Returns the
    outputs [T, HV, V] in the dtype of v (zero where no segment is) and the last states, laid out like `initial` and in
    its dtype; without it, in the accumulation dtype.
    """
    device, dtype = tokens.q.device, gates.accumulate_dtype(tokens.q.dtype)
    value_heads, key_dim, value_dim = tokens.value_heads, tokens.key_dim, tokens.value_dim
    if initial is None:
        state = torch.zeros(segments.count, value_heads, key_dim, value_dim, dtype=dtype, device=device)
    else:
        state = (initial.transpose(-1, -2) if state_v_first else initial).to(dtype)
    out = torch.zeros(tokens.count, value_heads, value_dim, dtype=tokens.v.dtype, device=device)
    plan = [list(group.blocks(block_rows(tokens))) for group in groups(segments, value_heads, device)]
    if plan:
        order = np.concatenate([group.segments for group in groups(segments, value_heads, device)])
        members = to_device(order, device)
        outputs, last = _run_differentiable(tokens, plan, state.index_select(0, members))
        blocks = [block for part in plan for block in part]
        keep = np.flatnonzero(np.concatenate([block.valid for block in blocks]))
        rows = np.concatenate([block.token for block in blocks]).reshape(-1)[keep]
        values = outputs.index_select(0, to_device(keep, device)).to(out.dtype)
        out = out.index_copy(0, to_device(rows, device), values)
        state = state.index_copy(0, members, last)
    state = (state.transpose(-1, -2) if state_v_first else state).contiguous()
    return out, state if initial is None else state.to(initial.dtype)


def _run_differentiable(tokens: Tokens, plan: list[list[Block]], state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the blocks of each group of `state` [n, HV, K, V]: outputs [rows of the blocks, HV, V], last states.

    For the gradient each block is computed again, from the state before it: what is kept is one state a block. Inputs
    are brought into block order once, since the gradient of a slice is as large as what it was cut from.
    """
    blocks = [block for part in plan for block in part]
    index = to_device(np.concatenate([block.token for block in blocks]).reshape(-1), state.device)
    sizes = [block.token.size for block in blocks]
    operands = (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
    parts = zip(*(x.index_select(0, index).split(sizes) for x in operands), strict=True)
    outputs: list[Tensor] = []
    last: list[Tensor] = []
    for group, current in zip(plan, state.split([part[0].alive[0] for part in plan]), strict=True):
        current, finished = current.flatten(0, 1), []
        for block in group:
            count = block.alive[0] * tokens.value_heads
            if count < current.shape[0]:
                finished.append(current[count:])
                current = current[:count]
            q, k, v, g, beta = next(parts)
            part = replace(tokens, q=q, k=k, v=v, g=g, beta=beta)
            if torch.is_grad_enabled():
                results = checkpoint(_block, part, block, current, use_reentrant=False, preserve_rng_state=False)
            else:
                results = _block(part, block, current)
            out, current, *left = results
            finished += left
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        last += [current, *reversed(finished)]
    return torch.cat(outputs), torch.cat(last).view(state.shape)


def _block(tokens: Tokens, block: Block, state: Tensor) -> tuple[Tensor, ...]:
    """Outputs of a block, the states after it, and the states of the segments that ended on the way."""
    finished: list[Tensor] = []
    outputs: list[Tensor] = []
    steps = load(tokens, block, slice(None), Scratch(state.dtype, state.device, reuse=False)).split(block.alive)
    for alive, step in zip(block.alive, steps, strict=True):
        count = alive * tokens.value_heads
        if count < state.shape[0]:
            finished.append(state[count:])
            state = state[:count]
        out, state = chunk.advance(step, state)
        outputs.append(out)
    return torch.cat(outputs), state, *finished


@dataclass(slots=True, eq=False)
class Pools:
    """Where the segments of a call start from and end, without host copies of device data."""

    real: Tensor  # bool [N], false for padding rows
    starts: Tensor | None  # bool [N], rows that read `initial`; None: all start from zero
    read_slots: Tensor | None
    write_slots: Tensor | None

    @staticmethod
    def of(call: PrefillCall) -> Pools:
        count, device = call.segments.count, call.tokens.q.device
        real = torch.ones(count, dtype=torch.bool, device=device)
        identity = torch.arange(count, device=device)
        read, write, starts = None, None, None
        if call.initial is not None:
            read = identity if call.read_slots is None else call.read_slots
            if call.read_slots is not None:
                real = real & pools.usable(read, call.initial.shape[0], call.pad_slot)
            starts = real if call.has_initial_state is None else call.has_initial_state.bool()
        if call.final is not None:
            write = identity if call.write_slots is None else call.write_slots
            if call.write_slots is not None:
                real = real & pools.usable(write, call.final.shape[0], call.pad_slot)
        return Pools(real, starts, read, write)


def prefill(call: PrefillCall) -> None:
    """`Backend.prefill`: writes `call.out`, `call.final` and the checkpoint pool in place."""
    tokens, segments = call.tokens, call.segments
    device, dtype = tokens.q.device, gates.accumulate_dtype(tokens.q.dtype)
    where = Pools.of(call)
    shape = (segments.count, tokens.value_heads, tokens.key_dim, tokens.value_dim)
    if call.initial is None or where.starts is None or where.read_slots is None or call.initial.shape[0] == 0:
        state = torch.zeros(shape, dtype=dtype, device=device)
    else:
        mask = where.real & where.starts
        state = pools.read_rows(call.initial, where.read_slots, mask)
        state = (state.transpose(-1, -2) if call.state_v_first else state).to(dtype).contiguous()
        state.masked_fill_(~mask[:, None, None, None], 0.0)
    scratch = Scratch(dtype, device, reuse=True)
    exports = _exports(call.checkpoints) if call.checkpoint_pool is not None else {}
    for group in groups(segments, tokens.value_heads, device):
        members = to_device(group.segments, device)
        real = where.real.index_select(0, members)
        boundary = _exporter(call, group, real, exports) if exports else None
        part = state.index_select(0, members)
        run(tokens, group, part, _writer(call.out, real), boundary, scratch)
        state.index_copy_(0, members, part)
    if call.final is not None and where.write_slots is not None:
        values = state.transpose(-1, -2) if call.state_v_first else state
        pools.write_rows(call.final, where.write_slots, values, where.real)


def _writer(out: Tensor, real: Tensor) -> Emit:
    """Writes the outputs of blocks into their rows of `out`; rows of padding segments become zero."""
    known_real = out.device.type == "cpu" and bool(real.all())

    def emit(block: Block, values: Tensor) -> None:
        if not known_real:
            mask = real.index_select(0, to_device(block.member, out.device))
            values = torch.where(mask[:, None, None, None], values, 0.0)
        values = values.transpose(1, 2)  # [R, C, HV, V]
        span = block.span()
        if span is not None:
            out[span].unflatten(0, values.shape[:2]).copy_(values)
            return
        keep = np.flatnonzero(block.valid)
        rows = values.flatten(0, 1).index_select(0, to_device(keep, out.device)).to(out.dtype)
        out.index_copy_(0, to_device(block.token.reshape(-1)[keep], out.device), rows)

    return emit


def _exports(checkpoints: Checkpoints | None) -> dict[int, list[tuple[int, int]]]:
    """Chunks done -> (segment, slot) of the checkpoints to export then."""
    table: dict[int, list[tuple[int, int]]] = {}
    if checkpoints is not None:
        begin, offset, slot = checkpoints.host_values()
        segment = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
        for n, tokens, row in zip(segment.tolist(), offset.tolist(), slot.tolist(), strict=True):
            table.setdefault(tokens // chunk.CHUNK, []).append((n, row))
    return table


def _exporter(call: PrefillCall, group: Group, real: Tensor, exports: dict[int, list[tuple[int, int]]]) -> Boundary:
    """Copies states into the checkpoint pool whenever a segment of the group reaches an offset."""
    pool = call.checkpoint_pool
    position = {int(n): i for i, n in enumerate(group.segments)}

    def boundary(done: int, state: Tensor) -> None:
        due = [
            (position[n], row)
            for n, row in exports.get(done, ())
            if n in position and done * chunk.CHUNK <= group.length[position[n]] and 0 <= row < pool_rows
        ]
        if pool is None or not due:
            return
        table = to_device(np.asarray(due, dtype=np.int64).T.copy(), state.device)
        values = state.index_select(0, table[0])
        values = values.transpose(-1, -2) if call.state_v_first else values
        pools.write_rows(pool, table[1], values, real.index_select(0, table[0]))

    pool_rows = 0 if pool is None else pool.shape[0]
    return boundary
