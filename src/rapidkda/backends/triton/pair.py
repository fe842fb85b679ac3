"""Verification by replay of one draft: a request has two tokens at most, and as many records, or more where the states
are deferred.

Deferred records enter a block of rows one after another: the keys of the last ones, times the decays after them, are
made once and kept, and what a slot may hold before these is folded in from memory.

Both tokens read the state at once, as in chunk.py, but every sum is one of the plain units: a product of the state with
four vectors is too narrow for the matrix units.

Tiles [WARPS, rows, K] give every warp some rows. Vectors over channels are tiles [WARPS, 1, K] with equal rows: a warp
computes its own copy of what is the same for all rows, and no channel leaves its warp.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from . import launch
from .blocks import L2_EPS, amplitude_of, exp, gate_decay, narrow, usable, with_held, within, write_strength
from .chunk import fold

MOST = 2  # tokens
PAIR = tl.constexpr(MOST)
AT_ONCE = tl.constexpr(6)  # records of deferred states, the last ones, whose keys are kept in registers
REGISTERS = 168  # of a thread then, where programs are many: three of them a multiprocessor


@triton.jit
def _unit(x, L2NORM: tl.constexpr):
    x = x.to(tl.float32)
    if L2NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 2) + L2_EPS)[:, :, None]
    return x


@triton.jit(do_not_specialize=launch.STEP_SIZES, do_not_specialize_on_alignment=launch.TABLES)
def pair_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, p_out, p_pool, p_records, p_first, p_length, p_slot,
    p_accepted, p_held,
    tokens, pool_rows, pad_slot, positions, group, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h, o_t, o_h,
    first_s, length_s, slots_s, accepted_s, pool_s, records_s, records_j,
    GATE: tl.constexpr, LOGITS: tl.constexpr, L2NORM: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, V_FIRST: tl.constexpr, HEADS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Fold the accepted records, store the state, run the tokens, record them. Grid (N HEADS): the heads of a request
    side by side, so that programs that run at once read and write memory in order.

    With p_held, new records follow the old ones and the state is not stored, as long as there is room."""
    n = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    channels = tl.broadcast_to(tl.arange(0, K)[None, None, :], [WARPS, 1, K])
    warp = tl.arange(0, WARPS)[:, None]
    slot = tl.load(p_slot + n * slots_s).to(tl.int64)
    first, count = within(tl.load(p_first + n * first_s), tl.load(p_length + n * length_s), tokens)
    first, count = first.to(tl.int64), tl.minimum(count, positions)
    taken = tl.minimum(tl.maximum(tl.load(p_accepted + n * accepted_s).to(tl.int64), 0), positions).to(tl.int32)
    real = usable(slot, pool_rows, pad_slot)
    taken = tl.where(real & (count > 0), taken, 0)
    full, base = taken > 0, 0  # whether the state is stored, and the row of the first new record
    if p_held is not None:
        count = tl.minimum(count, PAIR)
        p_held += slot * HEADS + head
        taken = with_held(p_held, 0, taken, positions)
        full = full & (taken + count > positions)
        base = tl.where(full, 0, taken)
    p_records += slot * records_s + head * (2 * K + V)
    p_q += first * q_t + (head // group) * q_h + channels
    p_k += first * k_t + (head // group) * k_h + channels
    p_g += first * g_t + head * g_h + channels
    p_v += first * v_t + head * v_h
    p_beta += first * b_t + head * b_h
    p_out += first * o_t + head * o_h
    rows = warp * (VB // WARPS) + tl.arange(0, VB // WARPS)[None, :]
    if V_FIRST:
        p_state = p_pool + slot * pool_s + head * (K * V) + rows[:, :, None] * K + channels
    else:
        p_state = p_pool + slot * pool_s + head * (K * V) + channels * V + rows[:, :, None]
    if p_held is None:
        old_k0 = tl.load(p_records + channels, mask=taken > 0, other=0.0)
        old_g0 = tl.load(p_records + K + channels, mask=taken > 0, other=0.0)
        old_k1 = tl.load(p_records + records_j + channels, mask=taken > 1, other=0.0)
        old_g1 = tl.load(p_records + records_j + K + channels, mask=taken > 1, other=0.0)
    else:
        earlier = tl.maximum(taken - AT_ONCE, 0)
        p_late = p_records + earlier * records_j
        old_k, old_g = (), ()
        for i in tl.static_range(AT_ONCE):
            old_k += (tl.load(p_late + i * records_j + channels, mask=earlier + i < taken, other=0.0),)
            old_g += (tl.load(p_late + i * records_j + K + channels, mask=earlier + i < taken, other=0.0),)
    k0 = tl.load(p_k, mask=count > 0, other=0.0)
    q0 = tl.load(p_q, mask=count > 0, other=0.0)
    g0 = tl.load(p_g, mask=count > 0, other=0.0)
    b0 = tl.load(p_beta, mask=count > 0, other=0.0)
    k1 = tl.load(p_k + k_t, mask=count > 1, other=0.0)
    q1 = tl.load(p_q + q_t, mask=count > 1, other=0.0)
    g1 = tl.load(p_g + g_t, mask=count > 1, other=0.0)
    b1 = tl.load(p_beta + b_t, mask=count > 1, other=0.0)
    bias = 0.0
    if p_dt_bias is not None:
        bias = tl.load(p_dt_bias + head * K + channels)
    a_log = 0.0
    if p_a_log is not None:
        a_log = tl.load(p_a_log + head)
    amplitude = amplitude_of(a_log)

    k0, k1 = _unit(k0, L2NORM), _unit(k1, L2NORM)
    q0, q1 = _unit(q0, L2NORM) * scale, _unit(q1, L2NORM) * scale
    g0 = gate_decay(g0.to(tl.float32), bias, amplitude, lower_bound, GATE, 1.0)
    g1 = gate_decay(g1.to(tl.float32), bias, amplitude, lower_bound, GATE, 1.0)
    b0 = write_strength(b0.to(tl.float32), beta_scale, LOGITS)
    b1 = write_strength(b1.to(tl.float32), beta_scale, LOGITS)
    part = warp[:, :, None]  # of the first four warps, each writes a row
    row = tl.where(part == 0, k0, tl.where(part == 1, g0, tl.where(part == 2, k1, g1)))
    p_row = p_records + (base + part // 2) * records_j + (part % 2) * K + channels
    mine = real & (part < 4) & (part // 2 < count)
    if p_held is None:
        late = exp(old_g1)
        decay, old_k0 = exp(old_g0) * late, old_k0 * late
        tl.debug_barrier()  # every warp has read the old records before any of them is overwritten
        tl.store(p_row, row, mask=mine)
    else:
        decay = tl.full(channels.shape, 1.0, tl.float32)  # from a record to the last one
        keys = ()  # last first
        for i in tl.static_range(AT_ONCE - 1, -1, -1):
            keys += (old_k[i] * decay,)
            decay *= exp(old_g[i])

    decay0, decay1 = exp(g0), exp(g1)
    seen = k0 * decay1  # the first key as the second token sees it
    c00, c11 = tl.sum(q0 * k0, 2), tl.sum(q1 * k1, 2)
    a10, c10 = tl.sum(k1 * seen, 2), tl.sum(q1 * seen, 2)
    k0, q0 = k0 * decay0, q0 * decay0
    k1, q1 = k1 * (decay1 * decay0), q1 * (decay1 * decay0)
    for block in range(0, V // VB):
        p_block = p_state + block * (VB * K if V_FIRST else VB)
        block_rows = block * VB + rows
        stored = tl.load(p_block, mask=real & (count > 0), other=0.0)
        if p_held is None:
            old_u0 = tl.load(p_records + 2 * K + block_rows, mask=taken > 0, other=0.0)
            old_u1 = tl.load(p_records + records_j + 2 * K + block_rows, mask=taken > 1, other=0.0)
        v0 = tl.load(p_v + block_rows, mask=count > 0, other=0.0)
        v1 = tl.load(p_v + v_t + block_rows, mask=count > 1, other=0.0)
        if p_held is None:
            state = stored.to(tl.float32) * decay + old_u0[:, :, None] * old_k0 + old_u1[:, :, None] * old_k1
        else:
            state = fold(stored.to(tl.float32), p_records, records_j, earlier, block_rows, channels, K, PAIR) * decay
            for i in tl.static_range(AT_ONCE):
                old_u = tl.load(p_late + i * records_j + 2 * K + block_rows, mask=earlier + i < taken, other=0.0)
                state += old_u[:, :, None] * keys[AT_ONCE - 1 - i]
        tl.store(p_block, narrow(state, p_pool.dtype.element_ty), mask=full)
        u0 = b0 * (v0.to(tl.float32) - tl.sum(state * k0, 2))
        o0 = tl.sum(state * q0, 2) + c00 * u0
        u1 = b1 * (v1.to(tl.float32) - tl.sum(state * k1, 2) - a10 * u0)
        o1 = tl.sum(state * q1, 2) + c10 * u0 + c11 * u1
        o0, o1 = tl.where(real, o0, 0.0), tl.where(real, o1, 0.0)
        tl.debug_barrier()  # as above: these rows of the corrections
        tl.store(p_out + block_rows, narrow(o0, p_out.dtype.element_ty), mask=count > 0)
        tl.store(p_out + o_t + block_rows, narrow(o1, p_out.dtype.element_ty), mask=count > 1)
        p_u = p_records + base * records_j + 2 * K + block_rows
        tl.store(p_u, u0, mask=real & (count > 0))
        tl.store(p_u + records_j, u1, mask=real & (count > 1))
    if p_held is not None:
        tl.debug_barrier()  # as above: the old keys and decays, which every block has folded
        tl.store(p_row, row, mask=mine)
        tl.store(p_held, base, mask=real & (count > 0))


launcher = launch.Launcher(pair_kernel)
