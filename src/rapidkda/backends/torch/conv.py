"""Causal depthwise convolution with a history pool.

A token whose taps all lie in its own segment is computed from the token axis alone; the first W - 1 tokens of every
segment are computed from their history and the segment's start. Both add the taps in the same order.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...problem import ConvCall
from . import pools
from .gates import accumulate_dtype, silu
from .spans import spans

BLOCK_ELEMENTS = 1 << 17  # of one temporary: few enough to stay in a cache


def conv(call: ConvCall) -> None:
    """`Backend.conv`: outputs, new histories, checkpoints."""
    segments, x = call.segments, call.x
    if segments.count == 0:
        return
    taps = call.weight.shape[1]
    read, write, real = _rows(call)
    history = _read_history(call, read, real)  # [N, W-1, C]
    one_each = x.is_cpu and segments.total == segments.count and segments.max_length == 1
    if one_each and call.checkpoint_pool is None and bool(real.all()):
        _one_token_each(call, history, write)
        return
    if x.shape[0] > 0:
        known_real = real.device.type == "cpu" and bool(real.all())
        if segments.max_length >= taps:
            _body(call, None if known_real else real)
        _heads(call, history, None if known_real else real)
    if call.checkpoints is not None and call.checkpoint_pool is not None:
        _export(call, history, real)
    if call.pool is not None and write is not None:
        _write_history(call, history, write, real)


def _one_token_each(call: ConvCall, history: Tensor, write: Tensor | None) -> None:
    """A step of decode on a CPU: every segment is one token, so its taps are its history and itself."""
    index = call.segments.first_token.long()
    rows = call.x.index_select(0, index)
    taps = [*history.to(accumulate_dtype(call.x.dtype)).unbind(1), rows]
    call.out.index_copy_(0, index, _accumulate(taps, call).to(call.out.dtype))
    if call.pool is None or write is None:
        return
    newest = torch.cat([history[:, 1:], rows.unsqueeze(1).to(history.dtype)], dim=1)  # [N, W-1, C]
    window = _window(call.pool, call.channels_last)[:, : newest.shape[1]]
    window.index_copy_(0, write.long(), newest.to(window.dtype))


def _rows(call: ConvCall) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Slots read and written, and which rows are no padding."""
    count, device = call.segments.count, call.x.device
    if call.pool is None:
        return None, None, torch.ones(count, dtype=torch.bool, device=device)
    given = [slots for slots in (call.read_slots, call.write_slots) if slots is not None]
    usable = [pools.usable(slots, call.pool.shape[0], call.pad_slot) for slots in given]
    real = (
        torch.ones(count, dtype=torch.bool, device=device)
        if not usable
        else functools.reduce(torch.logical_and, usable)
    )
    identity = None if len(given) == 2 else torch.arange(count, device=device)
    read, write = (identity if slots is None else slots for slots in (call.read_slots, call.write_slots))
    return read, write, real


def _window(pool: Tensor, channels_last: bool) -> Tensor:
    """The pool as [S, L, C]."""
    return pool if channels_last else pool.transpose(1, 2)


def _read_history(call: ConvCall, read: Tensor | None, real: Tensor) -> Tensor:
    """The W - 1 inputs before each segment [N, W-1, C], oldest first, in the dtype of the pool."""
    taps, channels, device = call.weight.shape[1], call.x.shape[1], call.x.device
    if call.pool is None or read is None:
        return torch.zeros(call.segments.count, taps - 1, channels, dtype=call.x.dtype, device=device)
    window = pools.read_rows(_window(call.pool, call.channels_last), read, real)  # [N, L, C]
    starts = real if call.has_initial_state is None else real & (call.has_initial_state != 0)
    if call.accepted is None:
        history = window[:, : taps - 1].contiguous()
    else:
        offset = call.accepted.long().clamp(1, window.shape[1] - taps + 2) - 1
        history = _entries(window.contiguous(), offset.unsqueeze(1) + torch.arange(taps - 1, device=device))
    return torch.where(starts[:, None, None], history, 0.0)


def _entries(rows: Tensor, entry: Tensor) -> Tensor:
    """rows[n, entry[n, j]] for dense rows [N, L, C] and entry [N, J]."""
    count, length, channels = rows.shape
    index = entry + torch.arange(count, device=rows.device).unsqueeze(1) * length
    return rows.view(count * length, channels).index_select(0, index.flatten()).view(*entry.shape, channels)


def _accumulate(sources: list[Tensor], call: ConvCall) -> Tensor:
    """Sum of taps, bias and activation; sources[w] is the input under tap w, [..., C]."""
    dtype = accumulate_dtype(call.x.dtype)
    first, *others = call.weight.to(dtype).unbind(1)
    y = sources[0].to(dtype) * first
    for source, weight in zip(sources[1:], others, strict=True):
        y.addcmul_(source.to(dtype), weight)
    if call.bias is not None:
        y += call.bias.to(dtype)
    return silu(y) if call.silu else y


def _body(call: ConvCall, real: Tensor | None) -> None:
    """Every token from the token axis alone; wrong for the first W - 1 of a segment, which `_heads` overwrites."""
    taps = call.weight.shape[1]
    channels = call.x.shape[1]
    first, length = call.segments.host_values()
    size = max(1, BLOCK_ELEMENTS // channels)
    order = np.argsort(first, kind="stable")
    owners = np.repeat(order, length[order])  # segment of every covered token
    seen = 0
    for start, stop in spans(first, length):
        for begin in range(start, stop, size):
            end = min(begin + size, stop)
            low = begin - (taps - 1)
            rows = call.x[max(low, 0) : end]
            if low < 0:
                rows = F.pad(rows, (0, 0, -low, 0))
            y = _accumulate([rows[tap : tap + end - begin] for tap in range(taps)], call)
            if real is not None:
                owner = torch.from_numpy(owners[seen + begin - start : seen + end - start])
                y = torch.where(real.index_select(0, owner.to(y.device, non_blocking=True)).unsqueeze(1), y, 0.0)
            call.out[begin:end].copy_(y)
        seen += stop - start


def _near_start(call: ConvCall, positions: int) -> Tensor:
    """The first `positions` inputs of every segment [N, positions, C]; past its end, anything."""
    lane = torch.arange(positions, device=call.x.device)
    index = (call.segments.first_token.long().unsqueeze(1) + lane).clamp(max=call.x.shape[0] - 1)
    return call.x.index_select(0, index.flatten()).view(*index.shape, call.x.shape[1])


def _heads(call: ConvCall, history: Tensor, real: Tensor | None) -> None:
    """The first W - 1 tokens of every segment; zero for padding rows."""
    taps, segments = call.weight.shape[1], call.segments
    positions = min(taps - 1, segments.max_length)
    if positions == 0:
        return
    padded = torch.cat([history.to(accumulate_dtype(call.x.dtype)), _near_start(call, positions)], dim=1)
    y = _accumulate([padded[:, tap : tap + positions] for tap in range(taps)], call)
    if real is not None:
        y = torch.where(real[:, None, None], y, 0.0)
    for j in range(positions):
        pools.write_rows(call.out, segments.first_token + j, y[:, j], segments.length > j)


def _write_history(call: ConvCall, history: Tensor, write: Tensor, real: Tensor) -> None:
    """The newest inputs of each segment, from entry 0 of its slot."""
    segments, taps = call.segments, call.weight.shape[1]
    window = _window(call.pool, call.channels_last) if call.pool is not None else history
    if call.keep_all:
        positions = min(segments.max_length, window.shape[1] - (taps - 2))
        kept = history[:, 1:]
        entries = kept if call.x.shape[0] == 0 else torch.cat([kept, _near_start(call, positions).to(kept.dtype)], 1)
        for j in range(entries.shape[1]):
            mask = real & (segments.length > max(0, j - (taps - 2)))
            pools.write_rows(window[:, j], write, entries[:, j], mask)
        return
    newest = _before(call, history, segments.first_token, segments.length)
    pools.write_rows(window[:, : taps - 1], write, newest, real)


def _before(call: ConvCall, history: Tensor, first: Tensor, length: Tensor) -> Tensor:
    """The W - 1 inputs before token `length` of each segment [N, W-1, C]; history where the segment is shorter."""
    taps = call.weight.shape[1]
    position = length.long().unsqueeze(1) + torch.arange(-(taps - 1), 0, device=call.x.device)  # [N, W-1]
    old = _entries(history, (position + taps - 1).clamp(0, taps - 2))
    if call.x.shape[0] == 0:
        return old
    index = (first.long().unsqueeze(1) + position).clamp(0, call.x.shape[0] - 1)
    new = call.x.index_select(0, index.flatten()).unflatten(0, index.shape).to(history.dtype)
    return torch.where((position >= 0).unsqueeze(2), new, old)


def _export(call: ConvCall, history: Tensor, real: Tensor) -> None:
    """The history after `offset` tokens, for every checkpoint."""
    checkpoints, pool = call.checkpoints, call.checkpoint_pool
    if checkpoints is None or pool is None:
        return
    begin, offset, _ = checkpoints.host_values()
    if len(offset) == 0:
        return
    owner = torch.from_numpy(np.repeat(np.arange(len(begin) - 1), np.diff(begin))).to(call.x.device, non_blocking=True)
    lengths = call.segments.length.index_select(0, owner)
    states = _before(
        call, history.index_select(0, owner), call.segments.first_token.index_select(0, owner), checkpoints.offset
    )
    mask = real.index_select(0, owner) & (checkpoints.offset <= lengths)
    mask = mask & pools.usable(checkpoints.slot, pool.shape[0], -1)
    window = _window(pool, call.channels_last)
    pools.write_rows(window[:, : call.weight.shape[1] - 1], checkpoints.slot, states, mask)
