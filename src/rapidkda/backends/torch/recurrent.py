"""The token recurrence on pools: decode, speculative verification in all forms, and commit.

Source of the method: Kimi Linear (arXiv 2510.26692), section 3. Rows run as one batch; a verification loops over the
positions of its drafts. States keep the pool's layout, so nothing is transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...problem import CommitCall, DecodeCall, Tokens, VerifyCall
from . import gates, pools

CPU_BLOCK = 1 << 19  # state elements that run at once: few enough to stay in a CPU's second-level cache
DEVICE_BLOCK = 1 << 26


@dataclass(slots=True, eq=False)
class Rows:
    """Activated inputs of one token a row, in the accumulation dtype."""

    q: Tensor  # [N, HV, K], scaled
    k: Tensor  # [N, HV, K]
    v: Tensor  # [N, HV, V]
    g: Tensor  # [N, HV, K] log decay
    b: Tensor  # [N, HV]

    def part(self, here: slice) -> Rows:
        return Rows(self.q[here], self.k[here], self.v[here], self.g[here], self.b[here])


def blocks(count: int, pool: Tensor) -> Iterator[slice]:
    """Ranges of rows that run at once."""
    elements = CPU_BLOCK if pool.device.type == "cpu" else DEVICE_BLOCK
    size = max(1, elements // max(1, pool[0].numel() if pool.shape[0] else 1))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def load(tokens: Tokens, index: Tensor) -> Rows:
    """Gather and activate the tokens `index` [N]."""
    dtype = gates.accumulate_dtype(tokens.q.dtype)

    def take(x: Tensor) -> Tensor:
        return x.index_select(0, index).to(dtype)

    group = tokens.value_heads // tokens.heads
    q = gates.normalize(take(tokens.q), tokens.l2norm, tokens.scale)
    k = gates.normalize(take(tokens.k), tokens.l2norm)
    if group > 1:
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    return Rows(
        q=q,
        k=k,
        v=take(tokens.v),
        g=gates.log_decay(tokens.gate, take(tokens.g).unsqueeze(2)).squeeze(2),
        b=gates.write_strength(take(tokens.beta), tokens.beta_logits, tokens.beta_scale),
    )


def step(state: Tensor, rows: Rows, v_first: bool, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Advance `state` [N, HV, ...], dense, by one token a row, into `target` (default: in place).

    Returns the output and the correction u, both [N, HV, V]. The decayed state is never formed before it is read:
    <k, exp(g) S> is <k exp(g), S>.
    """
    n, heads, value_dim = rows.v.shape
    flat = state.flatten(0, 1)  # [M, V, K] or [M, K, V]
    after = flat if target is None else target.flatten(0, 1)
    decay = rows.g.exp().flatten(0, 1)  # [M, K]
    k, q = rows.k.flatten(0, 1), rows.q.flatten(0, 1)
    kq = torch.stack([k * decay, q * decay], dim=1)  # [M, 2, K]
    read = torch.bmm(kq, flat.transpose(1, 2) if v_first else flat)  # [M, 2, V]
    u = rows.b.reshape(-1, 1) * (rows.v.flatten(0, 1) - read[:, 0])
    out = read[:, 1] + (q * k).sum(-1, keepdim=True) * u
    if v_first:
        torch.mul(flat, decay.unsqueeze(1), out=after).addcmul_(u.unsqueeze(2), k.unsqueeze(1))
    else:
        torch.mul(flat, decay.unsqueeze(2), out=after).addcmul_(k.unsqueeze(2), u.unsqueeze(1))
    return out.view(n, heads, value_dim), u.view(n, heads, value_dim)


def decode(call: DecodeCall) -> None:
    """`Backend.decode`: one token a row, in place on the pool."""
    tokens, segments, pool = call.tokens, call.segments, call.pool
    if tokens.count == 0 or segments.count == 0:
        return
    if _in_place(call):
        _decode_in_place(call)
        return
    active = segments.length > 0
    read = pools.usable(call.read_slots, pool.shape[0], call.pad_slot)
    real = active & read & pools.usable(call.write_slots, pool.shape[0], call.pad_slot)
    index = torch.where(active, segments.first_token, 0)
    rows = load(tokens, index)
    out = torch.empty_like(rows.v)
    for here in blocks(segments.count, pool) if _apart(call, real) else (slice(0, segments.count),):
        _decode_rows(call, rows.part(here), here, real[here], out[here])
    _write_outputs(call.out, index, out, real, active)


def _in_place(call: DecodeCall) -> bool:
    """Whether the host can see that every row has a token, and a real slot that it leaves its state in again."""
    segments, slots = call.segments, call.write_slots
    return (
        slots.is_cpu
        and segments.total == segments.count
        and (call.read_slots is slots or torch.equal(call.read_slots, slots))
        and bool(pools.usable(slots, call.pool.shape[0], call.pad_slot).all())
    )


def _decode_in_place(call: DecodeCall) -> None:
    """`decode` without a look at what cannot occur: most steps of a serving engine."""
    pool, index = call.pool, call.segments.first_token
    rows = load(call.tokens, index)
    out = torch.empty_like(rows.v)
    whole = slice(0, index.shape[0])
    for here in blocks(index.shape[0], pool):
        slots = call.write_slots[here]
        state = pools.view_rows(pool, slots) if pool.dtype == out.dtype else None
        copied = state is None
        if state is None:
            state = pool.index_select(0, slots).to(out.dtype)
        out[here], _ = step(state, rows if here == whole else rows.part(here), call.state_v_first)
        if copied:
            pool.index_copy_(0, slots.long(), state.to(pool.dtype))
    call.out.index_copy_(0, index.long(), out.to(call.out.dtype))


def _decode_rows(call: DecodeCall, rows: Rows, here: slice, real: Tensor, out: Tensor) -> None:
    pool, read_slots, write_slots = call.pool, call.read_slots[here], call.write_slots[here]
    plain = pool.dtype == out.dtype and pool.is_cpu and bool(real.all())
    source = pools.view_rows(pool, read_slots) if plain else None
    target = pools.view_rows(pool, write_slots) if plain else None
    if source is not None and target is not None and _overlap_apart(source, target):
        source = None  # a shift within the pool: the rows are read before any is written
    if source is None:
        state = pools.read_rows(pool, read_slots, real).to(out.dtype)
        after = state if target is None else target
    else:
        state = source
        after = torch.empty_like(state) if target is None else target
    out[:], _ = step(state, rows, call.state_v_first, after)
    if target is None:
        pools.write_rows(pool, write_slots, after, real)


def _overlap_apart(source: Tensor, target: Tensor) -> bool:
    """Whether two dense views of one pool, of one size, share some of their memory but not all."""
    return 0 < abs(int(source.storage_offset()) - int(target.storage_offset())) < source.numel()


def _apart(call: DecodeCall, real: Tensor) -> bool:
    """Whether rows may run one after another: no row reads a slot that another one writes, as far as the host knows."""
    if call.read_slots is call.write_slots:
        return True
    if real.device.type != "cpu":
        return False
    read, write = call.read_slots[real].numpy(), call.write_slots[real].numpy()
    moved = write[read != write]
    return len(np.unique(read)) == len(read) and not np.isin(moved, read).any()


def verify(call: VerifyCall) -> None:
    """`Backend.verify`: all forms, in place on the pool and the records."""
    if call.tokens.count > 0:
        for here in blocks(call.segments.count, call.pool):
            _verify_rows(call, here)


def _verify_rows(call: VerifyCall, here: slice) -> None:
    tokens, pool, records = call.tokens, call.pool, call.records
    first, length = call.segments.first_token[here], call.segments.length[here]
    slots, accepted = call.slots[here], call.accepted[here]
    dtype = gates.accumulate_dtype(tokens.q.dtype)
    if records is None:
        start = accepted.clamp(1, slots.shape[1]).long() - 1
        current = slots.gather(1, start.unsqueeze(1)).squeeze(1)
    else:
        current = slots
    real = (length > 0) & pools.usable(current, pool.shape[0], call.pad_slot)
    if records is None:
        state = pools.read_rows(pool, current, real).to(dtype)
    else:
        taken = _taken(records, call.held, current, accepted, real)
        fits = taken + length.unsqueeze(1) <= records.shape[1]
        base = torch.zeros_like(taken) if call.held is None else torch.where(fits, taken, 0)
        state = _replay(pool, records, current, taken, real, taken > base, call.state_v_first, dtype)
    made: list[Tensor] = []
    for j in range(call.segments.max_length):
        present = length > j
        index = torch.where(present, first + j, 0)
        rows = load(tokens, index)
        out, u = step(state, rows, call.state_v_first)
        _write_outputs(call.out, index, out, real, present)
        if records is None:
            target = slots[:, j]
            mask = real & present & pools.usable(target, pool.shape[0], call.pad_slot)
            pools.write_rows(pool, target, state, mask)
            continue
        record = torch.cat([rows.k, rows.g, u], dim=-1)
        if call.held is None:
            pools.write_rows(records[:, j], current, record, real & present)
        else:
            made.append(record)
    if records is not None and call.held is not None and made:
        _append(records, current, torch.stack(made, 1), base, length, real)
        pools.write_rows(call.held, current, base, real)


def commit(call: CommitCall) -> None:
    """`Backend.commit`: fold the accepted records into the states."""
    real = pools.usable(call.slots, call.pool.shape[0], call.pad_slot)
    for here in blocks(call.slots.shape[0], call.pool):
        slots = call.slots[here]
        taken = _taken(call.records, call.held, slots, call.accepted[here], real[here])
        _replay(call.pool, call.records, slots, taken, real[here], taken > 0, call.state_v_first, torch.float32)


def _taken(records: Tensor, held: Tensor | None, slots: Tensor, accepted: Tensor, real: Tensor) -> Tensor:
    """How many records of each head are applied: int64 [N, HV]."""
    most = records.shape[1]
    count = accepted.long().clamp(0, most).unsqueeze(1)
    if held is None:
        return count.expand(-1, records.shape[2])
    before = pools.read_rows(held, slots, real).long().clamp(0, most)
    return torch.where(count > 0, before + count, 0).clamp(max=most)


def _append(records: Tensor, slots: Tensor, made: Tensor, base: Tensor, length: Tensor, real: Tensor) -> None:
    """Put the records `made` [N, J, HV, W] of as many tokens as `length` says at rows from `base` [N, HV]."""
    row = torch.arange(records.shape[1], device=records.device)[None, :, None] - base.unsqueeze(1)  # [N, R, HV]
    fresh = (row >= 0) & (row < length[:, None, None])
    source = row.clamp(0, made.shape[1] - 1).unsqueeze(-1).expand(-1, -1, -1, made.shape[-1])
    kept = pools.read_rows(records, slots, real)
    merged = torch.where(fresh.unsqueeze(-1), made.gather(1, source).to(records.dtype), kept)
    pools.write_rows(records, slots, merged, real)


def _replay(
    pool: Tensor,
    records: Tensor,
    slots: Tensor,
    taken: Tensor,
    real: Tensor,
    stored: Tensor,
    v_first: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The states [N, HV, ...] with the first `taken` [N, HV] records folded in; in the pool too where `stored` [N, HV].

    Records that were not accepted are dropped by selection, since they may hold anything. The decays after each record
    are summed from the last one back, so that the whole fold is one scaling and one product.
    """
    key_dim = pool.shape[-1] if v_first else pool.shape[-2]
    chosen = torch.arange(records.shape[1], device=pool.device)[:, None] < taken.unsqueeze(1)  # [N, J, HV]
    record = pools.read_rows(records, slots, real).to(dtype)  # [N, J, HV, 2K + V]
    record = torch.where(chosen.unsqueeze(-1), record, 0.0).transpose(1, 2).flatten(0, 1)  # [M, J, 2K + V]
    k, g, u = record.split([key_dim, key_dim, record.shape[-1] - 2 * key_dim], dim=-1)
    from_here = g.flip(1).cumsum(1).flip(1)  # [M, J, K] decays from each record on
    after = torch.cat([from_here[:, 1:], torch.zeros_like(g[:, :1])], dim=1)
    decay, k_end = from_here[:, 0].exp(), k * after.exp()
    state = pools.read_rows(pool, slots, real).to(dtype)
    flat = state.flatten(0, 1)
    if v_first:
        flat.mul_(decay.unsqueeze(1)).baddbmm_(u.transpose(1, 2), k_end)
    else:
        flat.mul_(decay.unsqueeze(2)).baddbmm_(k_end.transpose(1, 2), u)
    whole = state
    if not (stored.is_cpu and bool((stored == stored[:, :1]).all())):  # heads may differ in what they store
        whole = torch.where(stored[:, :, None, None], state.to(pool.dtype), pools.read_rows(pool, slots, real))
    pools.write_rows(pool, slots, whole, real & stored.any(1))
    return state


def _write_outputs(out: Tensor, index: Tensor, values: Tensor, real: Tensor, present: Tensor) -> None:
    """Outputs of the rows that have a token here; zero where the row is padding."""
    pools.write_rows(out, index, torch.where(real[:, None, None], values, 0.0), present)
