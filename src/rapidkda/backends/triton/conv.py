"""Causal depthwise convolution with a history pool: prefill, decode and verification in one kernel.

A program takes a tile of one segment's tokens and a block of channels. The program with a segment's first tile alone
touches the pools: it reads the history before it writes the new one, so that slots may be updated in place.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...problem import ConvCall
from . import launch
from .blocks import narrow, sigmoid, trips, usable, within

TILE = 128  # tokens of a program in long segments
ROWS = 16  # of them in flight at once
SCAN = 128  # segments whose tiles are counted at once


@triton.jit
def _find_tile(p_length, length_s, segments, tile, BT: tl.constexpr, SCAN: tl.constexpr):
    """Segment and tile within it of a running tile number; every segment has at least one. Segment -1: past the end."""
    n = -1
    base = 0
    local = 0
    start = 0
    while (n < 0) & (start < segments):
        index = start + tl.arange(0, SCAN)
        length = tl.load(p_length + index.to(tl.int64) * length_s, mask=index < segments, other=0)
        tiles = tl.where(index < segments, tl.maximum((length + BT - 1) // BT, 1), 0)
        ends = base + tl.cumsum(tiles, 0)
        total = base + tl.sum(tiles, 0)
        if tile < total:
            before = tl.sum((ends <= tile).to(tl.int32), 0)
            n = start + before
            local = tile - tl.sum(tl.where(index < n, tiles, 0), 0) - base
        base = total
        start += SCAN
    return n, local


@triton.jit
def _entry(p_pool, slot, entry, channels, pool_s, entry_s, channel_s):
    """Pointers to the entries [..., 1] and channels [1, ...] of a slot."""
    return p_pool + slot * pool_s + entry * entry_s + channels.to(tl.int64) * channel_s


@triton.jit
def _store_history(
    p_x, p_pool, real, length, first, read_slot, write_slot, offset, offsets, channels, in_channels, fresh,
    x_t, pool_s, entry_s, channel_s, W: tl.constexpr, BW: tl.constexpr, KEEP_ALL: tl.constexpr,
):  # fmt: skip
    """Write the newest inputs of a segment to its slot, from entry 0. A negative position is one of the old entries."""
    entries = tl.arange(0, BW).to(tl.int64)
    if KEEP_ALL:
        position = (entries - (W - 2))[:, None]
        due = (position < length) & (length > 0) & (entries < offsets + (W - 2))[:, None]
    else:
        position = (length - (W - 1) + entries)[:, None]
        due = (entries < W - 1)[:, None]
    due = due & real & in_channels[None, :]
    window = tl.load(p_x + (first + position) * x_t + channels[None, :], mask=due & (position >= 0), other=0.0)
    old = tl.load(
        _entry(p_pool, read_slot, offset + position + (W - 1), channels[None, :], pool_s, entry_s, channel_s),
        mask=due & (position < 0) & (fresh == 0),
        other=0.0,
    )
    window = tl.where(position < 0, old.to(tl.float32), window.to(tl.float32))
    tl.debug_barrier()  # every thread has read the old history
    tl.store(
        _entry(p_pool, write_slot, entries[:, None], channels[None, :], pool_s, entry_s, channel_s),
        narrow(window, p_pool.dtype.element_ty),
        mask=due,
    )


@triton.jit
def _export(
    p_x, p_checkpoint, real, first, at, slot, channels, in_channels, x_t, slot_s, entry_s, channel_s,
    W: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Write the history after `at` tokens to a checkpoint slot; at least 16 tokens, so all of it lies in x."""
    entries = tl.arange(0, BW).to(tl.int64)
    position = at - (W - 1) + entries
    due = ((entries < W - 1) & (position >= 0))[:, None] & in_channels[None, :] & real
    window = tl.load(p_x + (first + position)[:, None] * x_t + channels[None, :], mask=due, other=0.0).to(tl.float32)
    tl.store(
        _entry(p_checkpoint, slot, entries[:, None], channels[None, :], slot_s, entry_s, channel_s),
        narrow(window, p_checkpoint.dtype.element_ty),
        mask=due,
    )


@triton.jit(
    do_not_specialize=["tokens", "segments", "pool_rows", "checkpoint_rows", "pad_slot", "offsets"],
    do_not_specialize_on_alignment=launch.TABLES,
)
def conv_kernel(
    p_x, p_weight, p_bias, p_out, p_pool, p_checkpoint,
    p_first, p_length, p_read, p_write, p_has, p_accepted, p_begin, p_offset, p_slot,
    tokens, segments, pool_rows, checkpoint_rows, pad_slot, offsets,
    channels_total, x_t, out_t, weight_c, weight_w, bias_c, first_s, length_s, pool_s, entry_s, channel_s,
    read_s, write_s, has_s, accepted_s, begin_s, offset_s, slot_s,
    checkpoint_s, checkpoint_entry_s, checkpoint_channel_s,
    W: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr,
    SCAN: tl.constexpr, ONE_TILE: tl.constexpr, KEEP_ALL: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, channel blocks); ONE_TILE: no segment has more than BT tokens and program n takes segment n."""
    channels = tl.program_id(1) * BC + tl.arange(0, BC)
    in_channels = channels < channels_total
    if ONE_TILE:
        segment = tl.program_id(0)
        tile = 0
    else:
        segment, tile = _find_tile(p_length, length_s, segments, tl.program_id(0), BT, SCAN)
    if segment >= 0:
        n = segment.to(tl.int64)
        length = tl.load(p_length + n * length_s).to(tl.int64)
        first = tl.load(p_first + n * first_s).to(tl.int64)
        real = length >= 0
        first, length = within(first, length, tokens)
        read_slot = n
        write_slot = n
        offset = n * 0
        fresh = 0
        if p_pool is not None:
            if p_read is not None:
                read_slot = tl.load(p_read + n * read_s).to(tl.int64)
                real = real & usable(read_slot, pool_rows, pad_slot)
            if p_write is not None:
                write_slot = tl.load(p_write + n * write_s).to(tl.int64)
                real = real & usable(write_slot, pool_rows, pad_slot)
            if p_has is not None:
                fresh = (tl.load(p_has + n * has_s) == 0).to(tl.int32)
            if p_accepted is not None:
                accepted = tl.load(p_accepted + n * accepted_s).to(tl.int64)
                offset = tl.minimum(tl.maximum(accepted, 1), offsets) - 1
        weights = ()
        for tap in tl.static_range(W):
            weight = tl.load(p_weight + channels.to(tl.int64) * weight_c + tap * weight_w, mask=in_channels, other=0.0)
            weights = weights + (weight.to(tl.float32),)
        if p_bias is not None:
            bias = tl.load(p_bias + channels * bias_c, mask=in_channels, other=0.0).to(tl.float32)
        for group in range(0, BT // ROWS):
            start = tile * BT + group * ROWS
            p_row = p_x + (first + start) * x_t + channels  # ROWS rows of one channel block, each a vector
            rows = ()
            for back in tl.static_range(W - 1):
                at = start + (back - (W - 1))
                x = tl.load(
                    p_row + (back - (W - 1)) * x_t, mask=in_channels & real & (at >= 0) & (start < length), other=0.0
                ).to(tl.float32)
                if p_pool is not None:
                    old = tl.load(
                        _entry(p_pool, read_slot, offset + start + back, channels, pool_s, entry_s, channel_s),
                        mask=in_channels & real & (at < 0) & (fresh == 0),
                        other=0.0,
                    )
                    x = tl.where(at < 0, old.to(tl.float32), x)
                rows = rows + (x,)
            for row in tl.static_range(ROWS):  # all loads before the first store, which might alias them
                rows = rows + (tl.load(p_row + row * x_t, mask=in_channels & real & (start + row < length), other=0.0),)
            for row in tl.static_range(ROWS):
                y = rows[row].to(tl.float32) * weights[0]
                for tap in tl.static_range(1, W):
                    y += rows[row + tap].to(tl.float32) * weights[tap]
                if p_bias is not None:
                    y += bias
                if SILU:
                    y = y * sigmoid(y)
                tl.store(
                    p_out + (first + start + row) * out_t + channels,
                    narrow(tl.where(real, y, 0.0), p_out.dtype.element_ty),
                    mask=in_channels & (start + row < length),
                )
        if tile == 0:
            if p_pool is not None:
                _store_history(
                    p_x, p_pool, real, length, first, read_slot, write_slot, offset, offsets, channels, in_channels,
                    fresh, x_t, pool_s, entry_s, channel_s, W, BW, KEEP_ALL,
                )  # fmt: skip
            if p_checkpoint is not None:
                begin = tl.load(p_begin + n * begin_s)
                end = tl.load(p_begin + (n + 1) * begin_s)
                for i in range(trips(begin), trips(end)):
                    at = tl.load(p_offset + i * offset_s).to(tl.int64)
                    slot = tl.load(p_slot + i * slot_s).to(tl.int64)
                    _export(
                        p_x, p_checkpoint, real & usable(slot, checkpoint_rows, -1) & (at <= length), first, at, slot,
                        channels, in_channels, x_t, checkpoint_s, checkpoint_entry_s, checkpoint_channel_s, W, BW,
                    )  # fmt: skip


def _pool_strides(pool: Tensor | None, channels_last: bool) -> tuple[int, int, int]:
    """Slot, entry and channel strides."""
    if pool is None:
        return 0, 0, 0
    if channels_last:
        return pool.stride(0), pool.stride(1), pool.stride(2)
    return pool.stride(0), pool.stride(2), pool.stride(1)


_conv = launch.Launcher(conv_kernel)


def conv(call: ConvCall) -> None:
    """`Backend.conv`. Pads nothing and copies nothing; one launch."""
    if call.segments.count == 0:
        return
    prepared = call.memo.get("triton")
    if prepared is None:
        prepared = call.memo["triton"] = _bind(call)
    data = (call.x, call.weight, call.bias, call.out, call.pool, call.checkpoint_pool)
    prepared.alone(call, data, _tables(call))


def _tables(call: ConvCall) -> tuple[Tensor | None, ...]:
    segments, begin, offset, slot = call.segments, None, None, None
    if call.checkpoints is not None and call.checkpoint_pool is not None:
        begin, offset, slot = call.checkpoints.begin, call.checkpoints.offset, call.checkpoints.slot
    return (
        segments.first_token,
        segments.length,
        call.read_slots,
        call.write_slots,
        call.has_initial_state,
        call.accepted,
        begin,
        offset,
        slot,
    )


def _bind(call: ConvCall) -> launch.Launch:
    x, segments, pool = call.x, call.segments, call.pool
    channels, width = call.weight.shape
    entries = 0 if pool is None else pool.shape[1 if call.channels_last else 2]
    one_tile = segments.max_length <= TILE
    rows = next(size for size in (1, 4, ROWS, TILE) if segments.max_length <= size or size == TILE)
    # Few rows: one channel a thread, since the weights are most of the traffic; many: eight, for wide accesses.
    block, warps = (512, 2) if rows > ROWS else (128, 4)
    tiles = segments.count if one_tile else -(-x.shape[0] // rows) + segments.count
    window = triton.next_power_of_2(max(entries, width - 1) if call.keep_all else width - 1)
    table_strides = [launch.stride(table) for table in _tables(call)]
    return _conv.bind(
        x.device,
        (tiles, triton.cdiv(channels, block), 1),
        (
            x.shape[0],
            segments.count,
            launch.rows(pool),
            launch.rows(call.checkpoint_pool),
            call.pad_slot,
            entries - width + 2,
        ),
        (
            channels,
            x.stride(0),
            call.out.stride(0),
            *call.weight.stride(),
            launch.stride(call.bias),
            *table_strides[:2],
            *_pool_strides(pool, call.channels_last),
            *table_strides[2:],
            *_pool_strides(call.checkpoint_pool, call.channels_last),
        ),
        (width, rows, min(rows, ROWS), block, window, SCAN, one_tile, call.keep_all, call.silu),
        num_warps=warps,
    )
