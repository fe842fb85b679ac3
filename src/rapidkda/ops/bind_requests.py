"""Who the requests of a call are, and where their states lie: segment tables, slots, pools, checkpoints, records.
Checked like all else (bind.py), on the host, before anything is written. Used by `rapidkda.ops` only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checks, env
from ..problem import CHECKPOINT_ALIGNMENT, Tokens
from ..segments import Checkpoints, Segments
from ..segments import check_values as check_segment_values

MAX_SEQUENCES = 65535  # of a prefill: some kernels have them along a grid's last axis, which holds no more


def segment_table(segments: object, tokens: int, device: torch.device, max_length: int | None = None) -> Segments:
    """Check a segment table against a token axis; in debug mode, also the values that only the device knows."""
    if not isinstance(segments, Segments):
        raise TypeError(f"segments must be a rapidkda.Segments, got {type(segments).__name__}")
    checks.same_device("segments", segments.length, device)
    if segments.extent > tokens:
        raise ValueError(f"segments must lie inside the {tokens} tokens of q (or x), got some up to {segments.extent}")
    if max_length is not None and segments.max_length > max_length:
        raise ValueError(f"segments must have at most {max_length} tokens each here, got {segments.max_length}")
    if env.check_device_values():
        first, length = (t.cpu().numpy().astype(np.int64) for t in (segments.first_token, segments.length))
        check_segment_values("segments", first, length, tokens)
        if segments.host is not None and not all(map(np.array_equal, segments.host, (first, length))):
            raise ValueError("segments.host must equal the values on the device, got other values")
        if length.max(initial=0) > segments.max_length:
            raise ValueError(f"segments.max_length must bound every length {length.max()}, got {segments.max_length}")
    return segments


def sequences_of_prefill(name: str, count: int) -> None:
    """Check how many segments a prefill has; `name` of the argument that says so."""
    if count > MAX_SEQUENCES:
        raise ValueError(f"{name} must have at most {MAX_SEQUENCES} sequences in a prefill, got {count}")


def cu_seqlens_segments(cu_seqlens: Any, cu_seqlens_cpu: Any, tokens: int, device: torch.device) -> Segments:
    """Segments from cumulative lengths. Without a host twin the lengths are copied from the device once and kept."""
    checks.tensor("cu_seqlens", cu_seqlens)
    checks.dtype("cu_seqlens", cu_seqlens, checks.INTS)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have shape [N+1] with N >= 1, got {list(cu_seqlens.shape)}")
    checks.same_device("cu_seqlens", cu_seqlens, device)
    if cu_seqlens_cpu is not None:
        checks.tensor("cu_seqlens_cpu", cu_seqlens_cpu)
        checks.dtype("cu_seqlens_cpu", cu_seqlens_cpu, checks.INTS)
        checks.shape("cu_seqlens_cpu", cu_seqlens_cpu, cu_seqlens.shape, "[N+1] like cu_seqlens")
        checks.same_device("cu_seqlens_cpu", cu_seqlens_cpu, torch.device("cpu"))
        host = cu_seqlens_cpu
        if env.check_device_values() and not torch.equal(host.to(torch.int64), cu_seqlens.cpu().to(torch.int64)):
            raise ValueError("cu_seqlens_cpu must equal cu_seqlens, got other values")
    elif cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return Segments.from_cu_seqlens(cu_seqlens, max_length=tokens)
    else:
        host = cu_seqlens.cpu()
    values = host.numpy().astype(np.int64)
    steps = np.diff(values)
    if values[0] != 0 or values[-1] != tokens or (steps < 0).any():
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at the {tokens} tokens of q, got "
            f"{values.tolist() if len(values) <= 16 else [*values[:8].tolist(), '...', *values[-8:].tolist()]}"
        )
    return Segments.from_cu_seqlens(cu_seqlens, host)


def pool(
    name: str, value: object, tokens: Tokens, state_v_first: bool, rows: int | None = None, written: bool = True
) -> Tensor:
    """Check a state pool [S, HV, V, K] (V-first) or [S, HV, K, V]; the slot stride is free, the rest dense."""
    inner = (tokens.value_dim, tokens.key_dim) if state_v_first else (tokens.key_dim, tokens.value_dim)
    layout = "[S, HV, V, K]" if state_v_first else "[S, HV, K, V]"
    return _pool(name, value, (rows, tokens.value_heads, *inner), layout, tokens.q.device, written)


def _pool(
    name: str, value: object, expected: tuple[int | None, ...], layout: str, device: torch.device, written: bool
) -> Tensor:
    value = checks.tensor(name, value)
    checks.dtype(name, value, checks.STATE_DTYPES)
    checks.shape(name, value, expected, layout)
    checks.same_device(name, value, device)
    checks.dense_inner(name, value)
    if written:
        checks.no_self_overlap(name, value)
    return value


def conv_pool(name: str, value: object, x: Tensor, width: int, channels_last: bool) -> Tensor:
    """Check a convolution history pool [S, C, L] or [S, L, C], L >= W - 1; the slot stride is free, the rest dense."""
    value = checks.tensor(name, value)
    layout = "[S, L, C]" if channels_last else "[S, C, L]"
    checks.shape(name, value, (None, None, x.shape[1]) if channels_last else (None, x.shape[1], None), layout)
    if value.shape[1 if channels_last else 2] < width - 1:
        raise ValueError(f"{name} must hold L >= W - 1 = {width - 1} entries {layout}, got shape {list(value.shape)}")
    checks.dtype(name, value, (*checks.STATE_DTYPES, x.dtype))
    checks.same_device(name, value, x.device)
    checks.dense_inner(name, value)
    checks.no_self_overlap(name, value)
    return value


def slots(name: str, value: object, shape: tuple[int | None, ...], meaning: str, device: torch.device) -> Tensor:
    """Check a slot tensor: int32 or int64, any stride."""
    value = checks.tensor(name, value)
    checks.dtype(name, value, checks.INTS)
    checks.shape(name, value, shape, meaning)
    checks.same_device(name, value, device)
    return value


def slot_values(name: str, value: Tensor, rows: int, pad_slot: int, written: bool) -> None:
    """Debug mode only: every slot is the padding marker or in the pool, and no two rows write the same one."""
    if not env.check_device_values():
        return
    real = value.cpu().to(torch.int64).flatten()
    real = real[real != pad_slot]
    if len(real) and (real.min() < 0 or real.max() >= rows):
        raise ValueError(f"{name} must be in 0..{rows - 1} or the padding marker {pad_slot}, got {real.tolist()}")
    if written and len(real.unique()) != len(real):
        raise ValueError(f"{name} must not name a slot twice, got {real.tolist()}")


def slots_of_segments(
    write: Tensor,
    read: Tensor | None,
    count: int,
    rows: int,
    pad_slot: int,
    device: torch.device,
    prefix: str = "",
) -> None:
    """Check the rows of a pool that segments leave their states in, and those that they start from where these differ
    (`read_slots`, which has `prefix` before its name)."""
    slots("slots", write, (count,), "[N]", device)
    slot_values("slots", write, rows, pad_slot, written=True)
    if read is not None:
        slots(f"{prefix}read_slots", read, (count,), "[N]", device)
        slot_values(f"{prefix}read_slots", read, rows, pad_slot, written=False)
        _read_before_write(read, write, pad_slot)


def _read_before_write(read: Tensor, write: Tensor, pad_slot: int) -> None:
    """Debug mode only: no row reads a slot that another row writes, since rows run in any order."""
    if not env.check_device_values():
        return
    writers = {slot: n for n, slot in enumerate(write.tolist()) if slot != pad_slot}
    for n, slot in enumerate(read.tolist()):
        if writers.get(slot, n) != n:
            raise ValueError(f"read_slots must not name a slot that another row writes, got {slot} in row {n}")


def flags(name: str, value: object, count: int, device: torch.device) -> Tensor | None:
    """Check an optional per-segment flag tensor (has_initial_state)."""
    if value is None:
        return None
    value = checks.tensor(name, value)
    checks.dtype(name, value, checks.BOOLS)
    checks.shape(name, value, (count,), "[N]")
    checks.same_device(name, value, device)
    return value


def accepted(
    value: object,
    count: int,
    most: int,
    device: torch.device,
    held: Tensor | None = None,
    at: Tensor | None = None,
    pad_slot: int = -1,
) -> Tensor:
    """Check accepted counts: int32 or int64 [N]; in debug mode, that they are within 0..most, and with what their slots
    hold before them too."""
    result = slots("accepted", value, (count,), "[N]", device)
    if not env.check_device_values() or not count:
        return result
    low, high = int(result.min()), int(result.max())
    if low < 0 or high > most:
        meaning = "1 + k_max" if held is None else "the records of a slot"
        raise ValueError(f"accepted must be in 0..{most} ({meaning}), got {result.tolist()}")
    if held is not None and at is not None:
        real = (result > 0) & (at != pad_slot) & (at >= 0) & (at < held.shape[0])
        before = held[at[real].long()].long()
        if bool(((before < 0) | (before + result[real].unsqueeze(1) > most)).any()):
            raise ValueError(
                f"held and accepted must name at most the {most} records of a slot together, got accepted "
                f"{result[real].tolist()} after held {before.tolist()}"
            )
    return result


def checkpoints(
    value: object,
    target: Tensor | None,
    segments: Segments,
    device: torch.device,
    alignment: int = CHECKPOINT_ALIGNMENT,
) -> Checkpoints | None:
    """Check a checkpoint table against the segments; its pool is checked by the caller."""
    if value is None:
        if target is not None:
            raise ValueError("checkpoint_pool must be None unless checkpoints are given, got a tensor")
        return None
    if not isinstance(value, Checkpoints):
        raise TypeError(f"checkpoints must be a rapidkda.Checkpoints, got {type(value).__name__}")
    if target is None:
        raise ValueError("checkpoint_pool must be given with checkpoints, got None")
    checks.shape("checkpoints.begin", value.begin, (segments.count + 1,), "[N+1]")
    checks.shape("checkpoints.slot", value.slot, (None,), "[M]")
    checks.shape("checkpoints.offset", value.offset, tuple(value.slot.shape), "[M] like slot")
    for name in ("begin", "offset", "slot"):
        checks.dtype(f"checkpoints.{name}", getattr(value, name), (torch.int32,))
        checks.same_device(f"checkpoints.{name}", getattr(value, name), device)
    lengths = None if segments.host is None else segments.host[1]
    if value.host is not None:
        checkpoint_values(*value.host, lengths, value.slot.shape[0], target.shape[0], alignment)
    if env.check_device_values():
        begin, offset, slot = (t.cpu().numpy().astype(np.int64) for t in (value.begin, value.offset, value.slot))
        used = slice(0, max(0, int(begin[-1])))
        lengths = segments.length.cpu().numpy().astype(np.int64)
        checkpoint_values(begin, offset[used], slot[used], lengths, len(slot), target.shape[0], alignment)
        if value.host is not None and not all(map(np.array_equal, value.host, (begin, offset[used], slot[used]))):
            raise ValueError("checkpoints.host must equal the values on the device, got other values")
    return value


def checkpoint_values(
    begin: np.ndarray,
    offset: np.ndarray,
    slot: np.ndarray,
    lengths: np.ndarray | None,
    most: int,
    rows: int,
    alignment: int,
) -> None:
    """Check the values of a checkpoint table: of at most `most` entries, into a pool of so many rows."""
    if begin[0] != 0 or (np.diff(begin) < 0).any() or not len(offset) == len(slot) == begin[-1] <= most:
        raise ValueError(
            f"checkpoints.begin must start at 0, never decrease and end at the number of checkpoints, got "
            f"{begin.tolist()} for {len(offset)} offsets and {len(slot)} slots"
        )
    if (offset % alignment).any() or (offset <= 0).any():
        raise ValueError(f"checkpoints must have offsets that are multiples of {alignment}, got {offset.tolist()}")
    segment = np.repeat(np.arange(len(begin) - 1), np.diff(begin))
    if (np.diff(offset)[segment[1:] == segment[:-1]] < 0).any():
        raise ValueError(f"checkpoints must have offsets that rise within a segment, got {offset.tolist()}")
    if len(slot) and (slot.min() < 0 or slot.max() >= rows):
        raise ValueError(f"checkpoints must name slots below {rows}, got {slot.tolist()}")
    if len(np.unique(slot)) != len(slot):
        raise ValueError(f"checkpoints must not share a slot, got slots {slot.tolist()}")
    if lengths is not None and (offset > np.repeat(lengths, np.diff(begin))).any():
        raise ValueError(
            f"checkpoints must have offsets within their segments (lengths {lengths.tolist()}), got {offset.tolist()}"
        )


def records(value: object, rows: int, inner: tuple[int, int], device: torch.device) -> Tensor:
    """Check draft records: float32 [S, R, HV, 2K + V], dense within a slot."""
    value = checks.tensor("records", value)
    checks.dtype("records", value, (torch.float32,))
    checks.shape("records", value, (rows, None, *inner), "[S, R, HV, 2K + V]")
    if value.shape[1] < 1:
        raise ValueError(f"records must hold at least 1 token a slot, got shape {list(value.shape)}")
    checks.same_device("records", value, device)
    checks.dense_inner("records", value)
    checks.no_self_overlap("records", value)
    return value


def held(value: object, records: Tensor | None, device: torch.device) -> Tensor | None:
    """Check how many records lay before those of the last step: int32 [S, HV], contiguous; None without records."""
    if value is None:
        return None
    if records is None:
        raise ValueError("held must be None without records, got a tensor")
    value = checks.tensor("held", value)
    checks.dtype("held", value, (torch.int32,))
    checks.shape("held", value, (records.shape[0], records.shape[2]), "[S, HV]")
    checks.same_device("held", value, device)
    if not value.is_contiguous():
        raise ValueError(f"held must be contiguous, got strides {list(value.stride())}")
    return value


def pad_marker(value: object) -> int:
    """Check the padding marker of slot tensors: kernels take it as 32 bits, whatever the tensors hold."""
    marker = checks.integer("pad_slot", value, -(2**31))
    if marker >= 2**31:
        raise ValueError(f"pad_slot must be at most {2**31 - 1}, got {marker}")
    return marker
