"""First half of a prefill: everything of a tile that does not depend on the state, for all tiles at once.

With G the log decays summed inside a tile (in base 2), b the write strengths and k' the keys scaled to unit size (n is
the scale taken out, folded into b), the tile's update is

    T  = (I + L)^-1      L_ij = b_i n_i^2 <k'_i 2^(G_i - G_j), k'_j>, j < i
    wk = T diag(b n^2) k' 2^G      uv = T diag(b n) v      qd = q' 2^G      kr_j = k'_j 2^(G_C - G_j)
    U  = uv - wk S      O = q_scale (qd S + aq U)      S <- 2^(G_C) S + kr^T U

(`scan`). 2^(G_i - G_j) is a factor of row i times one of key j, both counted from the tile's start; over 16 tokens the
key's factor stays below 2^LIMIT for bounded gates. Rows of unbounded gates that decay further are redone pair by pair
with factors of at most 1. No factor of a row depends on a later token: outputs are causal bit for bit.

T comes from forward substitution in float32; products of powers of L would not survive nearly equal keys. Method: Kimi
Linear (arXiv 2510.26692); WY form: Yang et al. (arXiv 2406.06484).
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

C = tl.constexpr(16)  # tokens of a tile
LIMIT = tl.constexpr(116.0)  # 16 tokens of the strongest bounded gate; 2^116 and 2^-116 are ordinary numbers


@triton.jit
def _sizes(p_x, offsets, rows, L2NORM: tl.constexpr):
    """Of rows x [C, K]: a power of two near the inverse norm, and what is left to apply once x is scaled by it."""
    x = tl.load(p_x + offsets, mask=rows, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, 1)
    size, inverse = power_of_two(tl.sqrt(squares), -60, 60)
    if L2NORM:
        size = size * tl.rsqrt(squares + L2_EPS)
    return inverse, size


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
def _fine_product(a, b, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b with about 16 bits of a, whose entries cancel, and b in bfloat16."""
    if PRECISE:
        return dot_fp32(a, b, PRECISION)
    high, low = high_low(a)
    b = narrow(b, tl.bfloat16)
    return add_dot(dot(low, b), high, b)


@triton.jit
def _invert(lower):
    """(I + lower)^-1 of a strictly lower triangular [C, C] matrix, by forward substitution in float32."""
    lane = tl.arange(0, C)
    x = -lower
    for i in range(1, C):
        chosen = (lane == i)[:, None]
        row = tl.sum(tl.where(chosen, x, 0.0), 0)
        row = row + tl.sum(row[:, None] * x, 0)
        x = tl.where(chosen, row[None, :], x)
    return x + tl.where(lane[:, None] == lane[None, :], 1.0, 0.0)


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
                decayed = keys * tl.exp2(tl.minimum(since, 0.0))
                here = (lane == i)[:, None]
                kk = tl.where(here, tl.sum(decayed * _row(keys, lane, i)[None, :], 1)[None, :], kk)
                qk = tl.where(here, tl.sum(decayed * _row(queries, lane, i)[None, :], 1)[None, :], qk)
    return kk, qk


@triton.jit
def _as(x, pointer):
    """float32 to the type behind a pointer."""
    return narrow(x, pointer.dtype.element_ty)


@triton.jit(do_not_specialize=["tile_table", "tiles", "record_start", "heads", "group"])
def prepare_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, p_table, p_bf16, p_fp16, p_fp32,
    tile_table, tiles, record_start, heads, group, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h,
    GATE: tl.constexpr, LOGITS: tl.constexpr, L2NORM: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SLICE: tl.constexpr, RECORD: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one value head. Grid (tiles * HV); RECORD and record_start in units of 256 bytes.

    Channels are taken SLICE at a time, so that little is live at once. Rows past a segment's end act as b = 0, g = 0.
    """
    APART: tl.constexpr = PRECISE and GATE != BOUNDED
    KEYS: tl.constexpr = 3 if PRECISE else 4
    MATRICES: tl.constexpr = KEYS * C * K + C * V + C * C
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
        p_vectors = p_near + MATRICES
    else:
        p_near = p_bf16 + record * 128
        p_fine = p_fp16 + record * 128
        p_vectors = p_fp32 + record * 64 + MATRICES // 2
    lane = tl.arange(0, C)
    valid = lane < count
    rows = valid[:, None]
    token = first + lane
    key_head = head // group
    k_rows = token[:, None] * k_t + key_head * k_h
    q_rows = token[:, None] * q_t + key_head * q_h
    inverse_key, key_size = _sizes(p_k, k_rows + tl.arange(0, K)[None, :], rows, L2NORM)
    inverse_query, query_size = _sizes(p_q, q_rows + tl.arange(0, K)[None, :], rows, L2NORM)
    tl.store(p_vectors + K + C + lane, query_size * scale)
    b = tl.load(p_beta + token * b_t + head * b_h, mask=valid, other=0.0).to(tl.float32)
    b_value = tl.where(valid, write_strength(b, beta_scale, LOGITS), 0.0) * key_size
    b_key = b_value * key_size
    kk = tl.zeros([C, C], tl.float32)
    qk = tl.zeros([C, C], tl.float32)
    started = ()
    for part in tl.static_range(K // SLICE):
        channels = tl.arange(0, SLICE) + part * SLICE
        g = tl.load(p_g + token[:, None] * g_t + head * g_h + channels[None, :], mask=rows, other=0.0)
        k = tl.load(p_k + k_rows + channels[None, :], mask=rows, other=0.0).to(tl.float32)
        q = tl.load(p_q + q_rows + channels[None, :], mask=rows, other=0.0).to(tl.float32)
        bias = gate_bias(p_dt_bias, head, channels, K, SLICE)[None, :]
        g = log_decay(g.to(tl.float32), bias, p_a_log, lower_bound, head, GATE, LOG2_E)
        if GATE != BOUNDED:
            g = tl.where(g < -192.0, -192.0, g)  # 2^-192 is 0; deeper only loses digits of what follows
        g = tl.where(rows, g, 0.0)
        if APART:  # steep decays, lest they take the digits of the slow ones around them
            steep = tl.where(g < -8.0, g, 0.0)
            slow = tl.cumsum(g - steep, 0)
            steep = tl.cumsum(steep, 0)
            total = slow + steep
            rest = (_row(slow, lane, C - 1)[None, :] - slow) + (_row(steep, lane, C - 1)[None, :] - steep)
            decay = tl.exp2(_row(total, lane, C - 1))
        else:
            total = tl.cumsum(g, 0)
            slow = total
            steep = total
            whole = tl.sum(g, 0)
            rest = whole[None, :] - total
            decay = tl.exp2(whole)
        near = tl.exp2(total)
        keys = k * inverse_key[:, None]
        queries = q * inverse_query[:, None]
        near_keys = keys * near
        near_queries = queries * near
        if GATE == BOUNDED:
            past = keys * tl.exp2(-total)
            end_keys = past * decay[None, :]
        else:
            past = keys * tl.exp2(tl.minimum(-total, LIMIT))
            end_keys = keys * tl.exp2(rest)
        past = tl.trans(past)
        part_kk = _product(near_keys, past, PRECISE, PRECISION)
        part_qk = _product(near_queries, past, PRECISE, PRECISION)
        if GATE != BOUNDED:
            part_kk, part_qk = _redo_rows(keys, queries, part_kk, part_qk, total, slow, steep, lane, APART)
        kk += part_kk
        qk += part_qk
        offsets = lane[:, None] * K + channels[None, :]
        tl.store(p_near + C * K + offsets, _as(near_queries, p_near))
        high = _as(end_keys, p_fine)
        tl.store(p_fine + 2 * C * K + offsets, high)
        if not PRECISE:
            tl.store(p_fine + 3 * C * K + offsets, _as(end_keys - high.to(tl.float32), p_fine))
        tl.store(p_vectors + channels, decay)
        started = started + (near_keys,)

    aq = tl.where(lane[:, None] >= lane[None, :], qk, 0.0)
    tl.store(p_fine + KEYS * C * K + C * V + lane[:, None] * C + lane[None, :], _as(aq, p_fine))
    inverse = _invert(tl.where(lane[:, None] > lane[None, :], kk * b_key[:, None], 0.0))
    from_keys = inverse * b_key[None, :]
    for part in tl.static_range(K // SLICE):
        wk = _fine_product(from_keys, started[part], PRECISE, PRECISION)
        offsets = lane[:, None] * K + (tl.arange(0, SLICE) + part * SLICE)[None, :]
        tl.store(p_near + offsets, _as(wk, p_near))
    values = tl.arange(0, V)
    v = tl.load(p_v + token[:, None] * v_t + head * v_h + values[None, :], mask=rows, other=0.0).to(tl.float32)
    uv = _fine_product(inverse * b_value[None, :], v, PRECISE, PRECISION)
    p_uv = p_fine + KEYS * C * K + lane[:, None] * V + values[None, :]
    if PRECISE:
        tl.store(p_uv, uv)
    else:
        size, inverse_size = power_of_two(tl.max(tl.abs(uv), 1), -100, 110)  # float16 has few exponents
        tl.store(p_uv, narrow(uv * (inverse_size * 16384.0)[:, None], tl.float16))
        tl.store(p_vectors + K + lane, size / 16384.0)
