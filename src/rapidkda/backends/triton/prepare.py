"""First half of a prefill: everything of a tile that depends on neither states nor values, for all tiles at once.

With G the log decays summed inside a tile (in base 2), b the write strengths and k' the keys scaled to unit size (n is
the scale taken out), a tile needs

    kd = k' 2^G      qd = q' 2^G      kr_j = k'_j 2^(G_C - G_j)      aq_ij = <qd_i, k'_j 2^-G_j>, j <= i
    L_ij = b_i n_i^2 <kd_i, k'_j 2^-G_j>, j < i      T = (I + L)^-1 diag(b n)      P = aq T

so that (`scan`)

    R = v - n kd S      U = T R      O = q_scale (qd S + P R)      S <- 2^(G_C) S + kr^T U

2^(G_i - G_j) is a factor of row i times one of key j, both counted from the tile's start; over 16 tokens the key's
factor stays below 2^LIMIT for bounded gates. Rows of unbounded gates that decay further are redone pair by pair with
factors of at most 1. No factor of a row depends on a later token: outputs are causal bit for bit.

The inverse is forward substitution by blocks: a product of powers of all of L would not survive nearly equal keys.
Method: Kimi Linear (arXiv 2510.26692).
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
    exp2,
    exp2_of_negative,
    gate_bias,
    high_low,
    log_decay,
    narrow,
    rounded,
    spread,
    widened,
    write_strength,
)

C = tl.constexpr(16)  # tokens of a tile
LIMIT = tl.constexpr(116.0)  # 16 tokens of the strongest bounded gate; 2^116 and 2^-116 are ordinary numbers


@triton.jit
def _squares(p_x, offsets, K: tl.constexpr, SLICE: tl.constexpr, PRECISE: tl.constexpr):
    """Squared norms [C] of rows [C, K]."""
    if PRECISE:
        x = tl.load(p_x + offsets + tl.arange(0, K)[None, :])
        return tl.sum(x * x, 1)
    products = tl.zeros([C, C], tl.float32)  # on the matrix units, for a fifth of the instructions
    for part in tl.static_range(K // SLICE):
        x = _relabelled(tl.load(p_x + offsets + (tl.arange(0, SLICE) + part * SLICE)[None, :]), SLICE)
        products = add_dot(products, x, tl.trans(x))
    lane = tl.arange(0, C)
    return tl.sum(tl.where(lane[:, None] == lane[None, :], products, 0.0), 0)


@triton.jit
def _row(x, rows, row):
    """x[row] of x [R, K]."""
    return tl.sum(tl.where((rows == row)[:, None], x, 0.0), 0)


@triton.jit
def _last_row(x, S: tl.constexpr):
    """x[C - 1] of x [C, S]; half of the rows cannot be it."""
    _, half = tl.split(tl.permute(tl.reshape(x, [2, C // 2, S]), [1, 2, 0]))
    return _row(half, tl.arange(0, C // 2), C // 2 - 1)


@triton.jit
def _relabelled(x, S: tl.constexpr):
    """Columns of x [C, S] in another order, the same for both operands of a product that sums over them. Of 32 columns,
    those that a thread loads become those that it holds as an operand, so that nothing moves between threads."""
    return tl.reshape(tl.permute(tl.reshape(x, [C, S // 32, 4, 4, 2]), [0, 1, 3, 2, 4]), [C, S])


@triton.jit
def _product(a, b, S: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b^T of [C, S] operands."""
    if PRECISE:
        return dot_fp32(a, tl.trans(b), PRECISION)
    a = _relabelled(narrow(a, tl.bfloat16), S)
    return dot(a, tl.trans(_relabelled(narrow(b, tl.bfloat16), S)))


@triton.jit
def _exact_product(a, b, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b of small matrices, with 16 bits of both where records are in half precision."""
    if PRECISE:
        return dot_fp32(a, b, PRECISION)
    a_high, a_low = high_low(a)
    b_high, b_low = high_low(b)
    return add_dot(add_dot(dot(a_low, b_high), a_high, b_low), a_high, b_high)


@triton.jit
def _merge(x, lower, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of blocks twice the size: x inverts the diagonal blocks, `lower` is what lies below them."""
    return x - _exact_product(x, _exact_product(lower, x, PRECISE, PRECISION), PRECISE, PRECISION)


@triton.jit
def _invert(lower, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular [C, C] matrix, C = 16.

    Blocks of 4 by (I - L)(I + L^2), whose terms stay small, then merged twice, which is forward substitution by blocks.
    """
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    small = tl.where(row // 4 == column // 4, lower, 0.0)
    square = _exact_product(small, small, PRECISE, PRECISION)
    x = tl.where(row == column, 1.0, 0.0) - small + square - _exact_product(small, square, PRECISE, PRECISION)
    same = row // 8 == column // 8
    x = _merge(x, tl.where(same & (row // 4 != column // 4), lower, 0.0), PRECISE, PRECISION)
    return _merge(x, tl.where(same, 0.0, lower), PRECISE, PRECISION)


@triton.jit
def _redo_rows(keys, queries, kk, qk, total, slow, steep, lane, APART: tl.constexpr):
    """Pairs of a tile whose row decays by more than 2^-LIMIT, with factors of at most 1."""
    far = (tl.min(total, 1) < -LIMIT).to(tl.int32)
    if tl.max(far, 0) > 0:
        for i in range(0, C):
            if tl.max(tl.where(lane == i, far, 0), 0) > 0:
                since = _row(slow, lane, i)[None, :] - slow
                if APART:
                    since += _row(steep, lane, i)[None, :] - steep
                decayed = keys * exp2(tl.minimum(since, 0.0))
                here = (lane == i)[:, None]
                kk = tl.where(here, tl.sum(decayed * _row(keys, lane, i)[None, :], 1)[None, :], kk)
                qk = tl.where(here, tl.sum(decayed * _row(queries, lane, i)[None, :], 1)[None, :], qk)
    return kk, qk


@triton.jit
def _as(x, pointer):
    """float32 to the type behind a pointer."""
    return narrow(x, pointer.dtype.element_ty)


@triton.jit(do_not_specialize=["tile_table", "tiles", "record_start"])
def prepare_kernel(
    p_q, p_k, p_g, p_beta, p_a_log, p_dt_bias, p_table, p_bf16, p_fp32,
    tile_table, tiles, record_start, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, g_t, g_h, b_t, b_h,
    GATE: tl.constexpr, LOGITS: tl.constexpr, L2NORM: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    SLICE: tl.constexpr, RECORD: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one value head. Grid: `plan.tile_grid`. RECORD and record_start in units of 256 bytes.

    Channels are taken SLICE at a time, so that little is live at once. Rows past a segment's end act as b = 0, g = 0.
    """
    APART: tl.constexpr = PRECISE and GATE != BOUNDED
    PAIRS: tl.constexpr = 3 * C * K
    VECTORS: tl.constexpr = PAIRS + (2 if PRECISE else 4) * C * C
    heads = tl.num_programs(0)
    head = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if tile >= tiles:
        return
    entry = tl.load(p_table + tile_table + tile)  # both numbers at once: one wait
    first = entry & 0xFFFFFFFF
    count = (entry >> 32).to(tl.int32)
    if count == 0:
        return
    record = record_start + (tile.to(tl.int64) * heads + head) * RECORD
    if PRECISE:
        p_record = p_fp32 + record * 64
        p_vectors = p_record + VECTORS
    else:
        p_record = p_bf16 + record * 128
        p_vectors = p_fp32 + record * 64 + VECTORS // 2
    lane = tl.arange(0, C)
    valid = lane < count
    rows = valid[:, None]
    key_head = head // GROUP
    p_q += first * q_t + key_head * q_h
    p_k += first * k_t + key_head * k_h
    p_g += first * g_t + head * g_h
    real = tl.minimum(lane, count - 1)
    q_rows = spread(real, q_t)[:, None]
    k_rows = spread(real, k_t)[:, None]
    g_rows = spread(real, g_t)[:, None]
    # Keys, whose factors reach 2^LIMIT, are scaled by a power of two near the inverse norm; queries need none.
    squares = _squares(p_k, k_rows, K, SLICE, PRECISE)
    bits = ((squares.to(tl.int32, bitcast=True) >> 23) + 127) >> 1 << 23  # half the exponent: of the norm
    inverse_key = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    key_size = bits.to(tl.float32, bitcast=True)
    query_squares = tl.zeros([C], tl.float32)
    if L2NORM:
        key_size *= tl.rsqrt(squares + L2_EPS)
    tl.store(p_vectors + K + lane, key_size)
    b = tl.load(p_beta + (first * b_t + head * b_h) + spread(real, b_t)).to(tl.float32)
    b_value = tl.where(valid, write_strength(b, beta_scale, LOGITS), 0.0) * key_size
    b_key = b_value * key_size
    kk = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    bound = tl.where(rows, lower_bound, 0.0)
    for part in tl.range(0, K // SLICE, num_stages=1):  # a loop: unrolled, it takes more registers
        channels = tl.arange(0, SLICE) + part * SLICE
        g = tl.load(p_g + g_rows + channels[None, :])
        k = tl.load(p_k + k_rows + channels[None, :])
        q = tl.load(p_q + q_rows + channels[None, :])
        bias = gate_bias(p_dt_bias, head, channels, K, SLICE)[None, :]
        g = log_decay(widened(g), bias, p_a_log, bound, head, GATE, LOG2_E)
        if GATE != BOUNDED:
            g = tl.where(g < -192.0, -192.0, g)  # 2^-192 is 0; deeper only loses digits of what follows
            g = tl.where(rows, g, 0.0)
        if APART:  # steep decays, lest they take the digits of the slow ones around them
            steep = tl.where(g < -8.0, g, 0.0)
            slow = tl.cumsum(g - steep, 0)
            steep = tl.cumsum(steep, 0)
            total = slow + steep
        else:
            total = tl.cumsum(g, 0)
            slow = total
            steep = total
        whole = _last_row(total, SLICE)
        decay = exp2(whole)
        near = exp2(total)
        keys = widened(k) * inverse_key[:, None]
        queries = widened(q)
        if L2NORM:
            query_squares += tl.sum(queries * queries, 1)
        near_keys = keys * near
        if not PRECISE:
            near_keys = rounded(near_keys)
        near_queries = queries * near
        if GATE == BOUNDED:
            past = keys * exp2_of_negative(total)
        else:
            past = keys * exp2(tl.minimum(-total, LIMIT))
        if PRECISE:  # summed from the end: what is decayed least keeps all its digits
            end_keys = keys * exp2(tl.cumsum(g, 0, reverse=True) - g)
        elif GATE == BOUNDED:
            end_keys = past * decay[None, :]
        else:
            end_keys = keys * exp2(whole[None, :] - total)
        part_kk = _product(near_keys, past, SLICE, PRECISE, PRECISION)
        part_qk = _product(near_queries, past, SLICE, PRECISE, PRECISION)
        if GATE != BOUNDED:
            part_kk, part_qk = _redo_rows(keys, queries, part_kk, part_qk, total, slow, steep, lane, APART)
        kk += part_kk
        qk += part_qk
        offsets = lane[:, None] * K + channels[None, :]
        tl.store(p_record + offsets, _as(near_queries, p_record))
        tl.store(p_record + C * K + offsets, _as(near_keys, p_record))
        if not PRECISE:
            end_keys -= near_keys
        tl.store(p_record + 2 * C * K + offsets, _as(end_keys, p_record))
        tl.store(p_vectors + channels, decay)

    query_size = tl.zeros([C], tl.float32) + scale
    if L2NORM:
        query_size *= tl.rsqrt(query_squares + L2_EPS)
    tl.store(p_vectors + K + C + lane, query_size)
    pair = lane[:, None] * C + lane[None, :]
    aq = tl.where(lane[:, None] >= lane[None, :], qk, 0.0)
    lower = tl.where(lane[:, None] > lane[None, :], kk * b_key[:, None], 0.0)
    t = _invert(lower, PRECISE, PRECISION) * b_value[None, :]
    p = _exact_product(aq, t, PRECISE, PRECISION)
    if PRECISE:
        tl.store(p_record + PAIRS + pair, p)
        tl.store(p_record + PAIRS + C * C + pair, t)
    else:
        high, low = high_low(p)
        tl.store(p_record + PAIRS + pair, high)
        tl.store(p_record + PAIRS + 2 * C * C + pair, low)
        high, low = high_low(t)
        tl.store(p_record + PAIRS + C * C + pair, high)
        tl.store(p_record + PAIRS + 3 * C * C + pair, low)
