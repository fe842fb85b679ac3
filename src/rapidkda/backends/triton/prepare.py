"""First half of a prefill: everything of a tile that does not depend on the state, for all tiles at once.

With G the log decays summed inside a tile (in base 2), b the write strengths and k' the keys scaled to unit size (n is
the scale taken out, folded into b), the tile's update is

    T  = (I + L)^-1      L_ij = b_i n_i^2 <k'_i 2^(G_i - G_j), k'_j>, j < i
    wk = T diag(b n^2) k' 2^G      uv = T diag(b n) v      qd = q' 2^G      kr_j = k'_j 2^(G_C - G_j)
    U  = uv - wk S      O = q_scale (qd S + aq U)      S <- 2^(G_C) S + kr^T U

(`scan`). Decays are summed from the start of each block of 16 tokens; 2^(G_i - G_j) is a factor of row i times one of
key j: for keys of an earlier block, from their block's end, so that both are at most 1; for keys of the same block, from
the block's start, where the key's factor stays below 2^LIMIT for bounded gates. Rows of unbounded gates that decay
further are redone pair by pair. No factor of a row depends on a later token: outputs are causal bit for bit.

T comes from forward substitution in float32 on 16 x 16 blocks, merged pairwise; products of powers of L would not
survive nearly equal keys. Method: Kimi Linear (arXiv 2510.26692); WY form: Yang et al. (arXiv 2406.06484).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import (
    BOUNDED,
    L2_EPS,
    LOG2_E,
    add_dot,
    dot,
    dot_fp32,
    gate_bias,
    high_low,
    log_decay,
    narrow,
    power_of_two,
    write_strength,
)

BLOCK = tl.constexpr(16)
LIMIT = tl.constexpr(116.0)  # 16 tokens of the strongest bounded gate; 2^116 and 2^-116 are ordinary numbers


@triton.jit
def _unit(x, L2NORM: tl.constexpr):
    """Rows of x [C, K] scaled by powers of two to a norm in [1, 2), and the factor [C] that is left to apply."""
    squares = tl.sum(x * x, 1)
    size, inverse = power_of_two(tl.sqrt(squares), -60, 60)
    if L2NORM:
        return x * inverse[:, None], size * tl.rsqrt(squares + L2_EPS)
    return x * inverse[:, None], size


@triton.jit
def _row(x, rows, row):
    """x[row] of x [R, K]."""
    return tl.sum(tl.where((rows == row)[:, None], x, 0.0), 0)


@triton.jit
def _product(a, b, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    if PRECISE:
        return dot_fp32(a, b, PRECISION)
    return dot(narrow(a, tl.bfloat16), narrow(b, tl.bfloat16))


@triton.jit
def _split_product(a, b, EXACT_B: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b with about 16 bits of a and of b; EXACT_B: b holds bfloat16 values."""
    if PRECISE:
        return dot_fp32(a, b, PRECISION)
    a_high, a_low = high_low(a)
    if EXACT_B:
        b_high = narrow(b, tl.bfloat16)
        return add_dot(dot(a_low, b_high), a_high, b_high)
    b_high, b_low = high_low(b)
    return add_dot(add_dot(dot(a_low, b_high), a_high, b_low), a_high, b_high)


@triton.jit
def _invert(lower, rows, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular [C, C] matrix, float32."""
    BLOCKS: tl.constexpr = C // BLOCK
    left = tl.arange(0, BLOCKS)[:, None, None, None]
    right = tl.arange(0, BLOCKS)[None, None, :, None]
    lane = tl.arange(0, BLOCK)
    x = tl.sum(tl.where(left == right, -tl.reshape(lower, [BLOCKS, BLOCK, BLOCKS, BLOCK]), 0.0), 2)  # diagonal blocks
    for i in range(1, BLOCK):
        chosen = (lane == i)[None, :, None]
        row = tl.sum(tl.where(chosen, x, 0.0), 1)
        row = row + tl.sum(row[:, :, None] * x, 1)
        x = tl.where(chosen, row[:, None, :], x)
    x = x + tl.where(lane[:, None] == lane[None, :], 1.0, 0.0)[None, :, :]
    inverse = tl.reshape(tl.where(left == right, x[:, :, None, :], 0.0), [C, C])
    if C > BLOCK:  # two blocks: A^-1, B^-1 and -B^-1 X A^-1
        below = (rows >= BLOCK)[:, None] & (rows < BLOCK)[None, :]
        link = dot_fp32(tl.where(below, lower, 0.0), inverse, PRECISION)
        inverse = inverse - dot_fp32(inverse, link, PRECISION)
    return inverse


@triton.jit
def _redo_rows(keys, queries, kk, qk, local, rows, C: tl.constexpr):
    """Pairs inside a block for rows that decay by more than 2^-LIMIT there, with factors of at most 1."""
    far = (tl.min(local, 1) < -LIMIT).to(tl.int32)
    if tl.max(far, 0) > 0:
        for i in range(0, C):
            if tl.max(tl.where(rows == i, far, 0), 0) > 0:
                decayed = keys * tl.exp2(tl.minimum(_row(local, rows, i)[None, :] - local, 0.0))
                here = (rows == i)[:, None] & (rows // BLOCK == i // BLOCK)[None, :]
                kk = tl.where(here, tl.sum(decayed * _row(keys, rows, i)[None, :], 1)[None, :], kk)
                qk = tl.where(here, tl.sum(decayed * _row(queries, rows, i)[None, :], 1)[None, :], qk)
    return kk, qk


@triton.jit(do_not_specialize=["segments", "tiles", "record_start"])
def prepare_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, p_first, p_length, p_table, p_bf16, p_fp16, p_fp32,
    segments, tiles, record_start, heads, group, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h, first_s, length_s,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, RECORD: tl.constexpr,
    GATE: tl.constexpr, LOGITS: tl.constexpr, L2NORM: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one value head. Grid (tiles * HV); RECORD and record_start in units of 256 bytes."""
    tile = tl.program_id(0) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    n = tl.load(p_table + 2 * (segments + 1) + tile)
    if n < 0:
        return
    length = tl.load(p_length + n.to(tl.int64) * length_s)
    begin = (tile - tl.load(p_table + n)) * C
    BLOCKS: tl.constexpr = C // BLOCK
    rows = tl.arange(0, C)
    channels = tl.arange(0, K)
    values = tl.arange(0, V)
    valid = begin + rows < length
    token = tl.load(p_first + n.to(tl.int64) * first_s).to(tl.int64) + begin + rows
    key_head = head // group

    g = tl.load(p_g + token[:, None] * g_t + head * g_h + channels[None, :], mask=valid[:, None], other=0.0)
    bias = gate_bias(p_dt_bias, head, channels, K)[None, :]
    g = log_decay(g.to(tl.float32), bias, p_a_log, lower_bound, head, GATE) * LOG2_E
    if GATE != BOUNDED:
        g = tl.where(g < -192.0, -192.0, g)  # 2^-192 is 0; deeper only loses digits of what follows
    g = tl.reshape(tl.where(valid[:, None], g, 0.0), [BLOCKS, BLOCK, K])
    in_block = tl.cumsum(g, 1)
    whole = tl.sum(g, 1)  # [BLOCKS, K]
    local = tl.reshape(in_block, [C, K])
    near = tl.exp2(local)
    near_inverse = tl.exp2(tl.minimum(-local, LIMIT))
    to_end = tl.reshape(tl.exp2(whole[:, None, :] - in_block), [C, K])
    k = tl.load(p_k + token[:, None] * k_t + key_head * k_h + channels[None, :], mask=valid[:, None], other=0.0)
    keys, key_size = _unit(k.to(tl.float32), L2NORM)
    q = tl.load(p_q + token[:, None] * q_t + key_head * q_h + channels[None, :], mask=valid[:, None], other=0.0)
    queries, query_size = _unit(q.to(tl.float32), L2NORM)
    b = tl.load(p_beta + token * b_t + head * b_h, mask=valid, other=0.0).to(tl.float32)
    b = tl.where(valid, write_strength(b, beta_scale, LOGITS), 0.0)
    b_value = b * key_size
    b_key = b_value * key_size

    near_keys = keys * near
    near_queries = queries * near
    past = tl.trans(keys * near_inverse)
    kk = _product(near_keys, past, PRECISE, PRECISION)
    qk = _product(near_queries, past, PRECISE, PRECISION)
    if GATE != BOUNDED:
        kk, qk = _redo_rows(keys, queries, kk, qk, local, rows, C)
    kr = keys * to_end
    qd = near_queries
    kd = near_keys
    decay = tl.exp2(tl.sum(whole, 0))
    if BLOCKS > 1:
        blocks = tl.arange(0, BLOCKS)
        same = (rows // BLOCK)[:, None] == (rows // BLOCK)[None, :]
        past = tl.trans(kr)
        kk = tl.where(same, kk, _product(near_keys, past, PRECISE, PRECISION))
        qk = tl.where(same, qk, _product(near_queries, past, PRECISE, PRECISION))
        start = tl.where((blocks == 1)[:, None], tl.exp2(_row(whole, blocks, 0))[None, :], 1.0)  # decay before a block
        rest = tl.where((blocks == 0)[:, None], tl.exp2(_row(whole, blocks, 1))[None, :], 1.0)  # and after it
        start = tl.reshape(tl.broadcast_to(start[:, None, :], [BLOCKS, BLOCK, K]), [C, K])
        rest = tl.reshape(tl.broadcast_to(rest[:, None, :], [BLOCKS, BLOCK, K]), [C, K])
        kr = kr * rest
        qd = qd * start
        kd = kd * start
    qk = tl.where(rows[:, None] >= rows[None, :], qk, 0.0)
    inverse = _invert(tl.where(rows[:, None] > rows[None, :], kk * b_key[:, None], 0.0), rows, C, PRECISION)

    wk = _split_product(inverse * b_key[None, :], kd, False, PRECISE, PRECISION)
    v = tl.load(p_v + token[:, None] * v_t + head * v_h + values[None, :], mask=valid[:, None], other=0.0)
    EXACT_V: tl.constexpr = p_v.dtype.element_ty == tl.bfloat16
    uv = _split_product(inverse * b_value[None, :], v.to(tl.float32), EXACT_V, PRECISE, PRECISION)

    record = record_start + (tile.to(tl.int64) * heads + head) * RECORD
    key_offset = rows[:, None] * K + channels[None, :]
    value_offset = 3 * C * K + rows[:, None] * V + values[None, :]
    pair_offset = 3 * C * K + C * V + rows[:, None] * C + rows[None, :]
    MATRICES: tl.constexpr = 3 * C * K + C * V + C * C
    if PRECISE:
        p_record = p_fp32 + record * 64
        tl.store(p_record + key_offset, wk)
        tl.store(p_record + C * K + key_offset, qd)
        tl.store(p_record + 2 * C * K + key_offset, kr)
        tl.store(p_record + value_offset, uv)
        tl.store(p_record + pair_offset, qk)
        p_vectors = p_record + MATRICES
    else:
        p_near = p_bf16 + record * 128
        p_fine = p_fp16 + record * 128
        p_vectors = p_fp32 + record * 64 + MATRICES // 2
        tl.store(p_near + key_offset, narrow(wk, tl.bfloat16))
        tl.store(p_near + C * K + key_offset, narrow(qd, tl.bfloat16))
        tl.store(p_fine + 2 * C * K + key_offset, narrow(kr, tl.float16))
        size, inverse_size = power_of_two(tl.max(tl.abs(uv), 1), -100, 110)  # float16 has few exponents
        tl.store(p_fine + value_offset, narrow(uv * (inverse_size * 16384.0)[:, None], tl.float16))
        tl.store(p_fine + pair_offset, narrow(qk, tl.float16))
        tl.store(p_vectors + K + rows, size / 16384.0)
    tl.store(p_vectors + channels, decay)
    tl.store(p_vectors + K + C + rows, query_size * scale)
