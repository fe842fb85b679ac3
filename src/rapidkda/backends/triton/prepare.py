"""First half of a prefill: everything of a tile that depends on neither states nor values, for all tiles at once.

With G the log decays summed inside a tile (in base 2), b the write strengths and k' the keys scaled to unit size (n is
the scale taken out), a tile needs

    kd = k' 2^G      qd = q' 2^G      kr_j = k'_j 2^(G_C - G_j)      aq_ij = <qd_i, k'_j 2^-G_j>, j <= i
    L_ij = b_i n_i^2 <kd_i, k'_j 2^-G_j>, j < i      T = (I + L)^-1 diag(b n)

so that (`scan`)

    U = T (v - n kd S)      O = q_scale (qd S + aq U)      S <- 2^(G_C) S + kr^T U

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
    gate_bias,
    high_low,
    log_decay,
    narrow,
    write_strength,
)

C = tl.constexpr(16)  # tokens of a block
LIMIT = tl.constexpr(116.0)  # 16 tokens of the strongest bounded gate; 2^116 and 2^-116 are ordinary numbers


@triton.jit
def _sizes(p_x, offsets, rows, L2NORM: tl.constexpr):
    """Of rows x [C, K]: a power of two near the inverse norm, and what is left to apply once x is scaled by it."""
    x = tl.load(p_x + offsets, mask=rows, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, 1)
    bits = ((squares.to(tl.int32, bitcast=True) >> 23) + 127) >> 1 << 23  # half the exponent: of the norm
    size = bits.to(tl.float32, bitcast=True)
    if L2NORM:
        size = size * tl.rsqrt(squares + L2_EPS)
    return (0x7F000000 - bits).to(tl.float32, bitcast=True), size


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


@triton.jit
def _scalars(p_q, p_k, p_beta, token, valid, k_rows, q_rows, b_rows, scale, beta_scale,
    LOGITS: tl.constexpr, L2NORM: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Per row of a block: powers of two that scale keys and queries, what is left of their sizes, b n and b n^2."""
    channels = tl.arange(0, K)[None, :]
    inverse_key, key_size = _sizes(p_k, k_rows + channels, valid[:, None], L2NORM)
    inverse_query, query_size = _sizes(p_q, q_rows + channels, valid[:, None], L2NORM)
    b = tl.load(p_beta + b_rows, mask=valid, other=0.0).to(tl.float32)
    b_value = tl.where(valid, write_strength(b, beta_scale, LOGITS), 0.0) * key_size
    return inverse_key, inverse_query, key_size, query_size * scale, b_value, b_value * key_size


@triton.jit
def _slice(
    p_q, p_k, p_g, p_a_log, p_dt_bias, k_rows, q_rows, g_rows, rows, channels, head, lower_bound,
    inverse_key, inverse_query, lane,
    GATE: tl.constexpr, K: tl.constexpr, SLICE: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some channels of a block: what they add to its two matrices of pairs, keys and queries decayed since its start,
    keys decayed to its end [C, SLICE], and its whole decay [SLICE]."""
    APART: tl.constexpr = PRECISE and GATE != BOUNDED
    g = tl.load(p_g + g_rows + channels[None, :], mask=rows, other=0.0).to(tl.float32)
    k = tl.load(p_k + k_rows + channels[None, :], mask=rows, other=0.0).to(tl.float32)
    q = tl.load(p_q + q_rows + channels[None, :], mask=rows, other=0.0).to(tl.float32)
    bias = gate_bias(p_dt_bias, head, channels, K, SLICE)[None, :]
    g = log_decay(g, bias, p_a_log, tl.where(rows, lower_bound, 0.0), head, GATE, LOG2_E)
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
    whole = _row(total, lane, C - 1)
    decay = exp2(whole)
    near = exp2(total)
    keys = k * inverse_key[:, None]
    queries = q * inverse_query[:, None]
    near_keys = keys * near
    near_queries = queries * near
    if GATE == BOUNDED:
        past = keys * exp2(-total)
    else:
        past = keys * exp2(tl.minimum(-total, LIMIT))
    if PRECISE:  # summed from the end: what is decayed least keeps all its digits
        end_keys = keys * exp2(tl.cumsum(g, 0, reverse=True) - g)
    elif GATE == BOUNDED:
        end_keys = past * decay[None, :]
    else:
        end_keys = keys * exp2(whole[None, :] - total)
    past = tl.trans(past)
    kk = _product(near_keys, past, PRECISE, PRECISION)
    qk = _product(near_queries, past, PRECISE, PRECISION)
    if GATE != BOUNDED:
        kk, qk = _redo_rows(keys, queries, kk, qk, total, slow, steep, lane, APART)
    return kk, qk, near_keys, near_queries, end_keys, decay


@triton.jit
def _store_slice(p_near, p_fine, rows, channels, keys, queries, end_keys, K: tl.constexpr, TILE: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """Rows of kd, qd and kr."""
    offsets = rows[:, None] * K + channels[None, :]
    tl.store(p_near + offsets, _as(keys, p_near))
    tl.store(p_near + TILE * K + offsets, _as(queries, p_near))
    high = _as(end_keys, p_fine)
    tl.store(p_fine + 2 * TILE * K + offsets, high)
    if not PRECISE:
        tl.store(p_fine + 3 * TILE * K + offsets, _as(end_keys - high.to(tl.float32), p_fine))


@triton.jit
def _store_pairs(p_near, p_fine, row, column, t, aq, TILE: tl.constexpr, PRECISE: tl.constexpr):
    """A block of T and of aq."""
    offsets = row[:, None] * TILE + column[None, :]
    if PRECISE:
        tl.store(p_near + offsets, t)
        tl.store(p_near + TILE * TILE + offsets, aq)
    else:
        high, low = high_low(t)
        tl.store(p_near + offsets, high)
        tl.store(p_near + TILE * TILE + offsets, low)
        tl.store(p_fine + 2 * TILE * TILE + offsets, _as(aq, p_fine))


@triton.jit(do_not_specialize=["tile_table", "tiles", "record_start", "heads", "group"])
def prepare_kernel(
    p_q, p_k, p_g, p_beta, p_a_log, p_dt_bias, p_table, p_bf16, p_fp16, p_fp32,
    tile_table, tiles, record_start, heads, group, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, g_t, g_h, b_t, b_h,
    GATE: tl.constexpr, LOGITS: tl.constexpr, L2NORM: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
    SLICE: tl.constexpr, RECORD: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile, of one block or two, of one value head. Grid (tiles * HV); RECORD, record_start in units of 256 bytes.

    Channels are taken SLICE at a time, so that little is live at once. Rows past a segment's end act as b = 0, g = 0.
    """
    TWO: tl.constexpr = TILE == 2 * C
    PAIRS: tl.constexpr = (3 if PRECISE else 4) * TILE * K
    VECTORS: tl.constexpr = PAIRS + (2 if PRECISE else 3) * TILE * TILE
    tile = tl.program_id(0) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    count = tl.load(p_table + tile_table + tiles + tile)
    first = tl.load(p_table + tile_table + tile).to(tl.int64)
    if count == 0:
        return
    record = record_start + (tile.to(tl.int64) * heads + head) * RECORD
    if PRECISE:
        p_near = p_fp32 + record * 64
        p_fine = p_near
        p_vectors = p_near + VECTORS
    else:
        p_near = p_bf16 + record * 128
        p_fine = p_fp16 + record * 128
        p_vectors = p_fp32 + record * 64 + VECTORS // 2
    lane = tl.arange(0, C)
    valid = lane < count
    token = (first + lane)[:, None]
    key_head = head // group
    k_rows = token * k_t + key_head * k_h
    q_rows = token * q_t + key_head * q_h
    g_rows = token * g_t + head * g_h
    b_rows = (first + lane) * b_t + head * b_h
    inverse_key, inverse_query, key_size, query_size, b_value, b_key = _scalars(
        p_q, p_k, p_beta, token, valid, k_rows, q_rows, b_rows, scale, beta_scale, LOGITS, L2NORM, K
    )
    tl.store(p_vectors + K + lane, key_size)
    tl.store(p_vectors + K + TILE + lane, query_size)
    kk = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    if TWO:
        valid_2 = lane + C < count
        inverse_key_2, inverse_query_2, key_size_2, query_size_2, b_value_2, b_key_2 = _scalars(
            p_q, p_k, p_beta, token, valid_2, k_rows + C * k_t, q_rows + C * q_t, b_rows + C * b_t,
            scale, beta_scale, LOGITS, L2NORM, K,
        )  # fmt: skip
        tl.store(p_vectors + K + lane + C, key_size_2)
        tl.store(p_vectors + K + TILE + lane + C, query_size_2)
        kk_2 = tl.zeros([C, C], tl.float32)
        qk_2 = tl.zeros([C, C], tl.float32)
        kk_across = tl.zeros([C, C], tl.float32)
        qk_across = tl.zeros([C, C], tl.float32)
    for part in tl.range(0, K // SLICE, num_stages=STAGES):
        channels = tl.arange(0, SLICE) + part * SLICE
        part_kk, part_qk, keys, queries, end_keys, decay = _slice(
            p_q, p_k, p_g, p_a_log, p_dt_bias, k_rows, q_rows, g_rows, valid[:, None], channels, head, lower_bound,
            inverse_key, inverse_query, lane, GATE, K, SLICE, PRECISE, PRECISION,
        )  # fmt: skip
        kk += part_kk
        qk += part_qk
        if TWO:
            part_kk, part_qk, keys_2, queries_2, end_keys_2, decay_2 = _slice(
                p_q, p_k, p_g, p_a_log, p_dt_bias, k_rows + C * k_t, q_rows + C * q_t, g_rows + C * g_t,
                valid_2[:, None], channels, head, lower_bound,
                inverse_key_2, inverse_query_2, lane, GATE, K, SLICE, PRECISE, PRECISION,
            )  # fmt: skip
            kk_2 += part_kk
            qk_2 += part_qk
            across = tl.trans(end_keys)
            kk_across += _product(keys_2, across, PRECISE, PRECISION)
            qk_across += _product(queries_2, across, PRECISE, PRECISION)
            _store_slice(
                p_near, p_fine, lane + C, channels, keys_2 * decay[None, :], queries_2 * decay[None, :], end_keys_2,
                K, TILE, PRECISE,
            )  # fmt: skip
            end_keys = end_keys * decay_2[None, :]
            decay = decay * decay_2
        _store_slice(p_near, p_fine, lane, channels, keys, queries, end_keys, K, TILE, PRECISE)
        tl.store(p_vectors + channels, decay)

    p_pairs = p_near + PAIRS
    p_fine_pairs = p_fine + PAIRS
    below = lane[:, None] > lane[None, :]
    t = _invert(tl.where(below, kk * b_key[:, None], 0.0), PRECISE, PRECISION)
    aq = tl.where(lane[:, None] >= lane[None, :], qk, 0.0)
    _store_pairs(p_pairs, p_fine_pairs, lane, lane, t * b_value[None, :], aq, TILE, PRECISE)
    if TWO:
        t_2 = _invert(tl.where(below, kk_2 * b_key_2[:, None], 0.0), PRECISE, PRECISION)
        aq_2 = tl.where(lane[:, None] >= lane[None, :], qk_2, 0.0)
        _store_pairs(p_pairs, p_fine_pairs, lane + C, lane + C, t_2 * b_value_2[None, :], aq_2, TILE, PRECISE)
        from_first = _exact_product(kk_across * b_key_2[:, None], t, PRECISE, PRECISION)
        t_across = -_exact_product(t_2, from_first, PRECISE, PRECISION) * b_value[None, :]
        _store_pairs(p_pairs, p_fine_pairs, lane + C, lane, t_across, qk_across, TILE, PRECISE)
        nothing = tl.zeros([C, C], tl.float32)
        _store_pairs(p_pairs, p_fine_pairs, lane, lane + C, nothing, nothing, TILE, PRECISE)
