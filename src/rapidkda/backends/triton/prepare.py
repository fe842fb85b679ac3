"""First half of a prefill: everything of a tile that does not depend on the state, for all tiles at once.

With G the log decays summed inside a tile (in base 2), b the write strengths and k' the keys scaled to unit size (n is
the scale taken out, folded into b), the tile's update is

    T  = (I + L)^-1      L_ij = b_i n_i^2 <k'_i 2^(G_i - G_j), k'_j>, j < i
    wk = T diag(b n^2) k' 2^G      uv = T diag(b n) v      qd = q' 2^G      kr_j = k'_j 2^(G_C - G_j)
    U  = uv - wk S      O = q_scale (qd S + aq U)      S <- 2^(G_C) S + kr^T U

(`scan`). A tile is one block of 16 tokens or two. Decays are summed from the start of a block; 2^(G_i - G_j) is a
factor of row i times one of key j: for keys of the block before, from that block's end, so that both are at most 1; for
keys of the same block, from its start, where the key's factor stays below 2^LIMIT for bounded gates. Rows of unbounded
gates that decay further are redone pair by pair. No factor of a row depends on a later token: outputs are causal bit
for bit.

T comes from forward substitution in float32 inside a block and by block across the two; products of powers of L would
not survive nearly equal keys. Method: Kimi Linear (arXiv 2510.26692); WY form: Yang et al. (arXiv 2406.06484).
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
def _near(x):
    """x in bfloat16."""
    if x.dtype == tl.bfloat16:
        return x
    return narrow(x, tl.bfloat16)


@triton.jit
def _product(a, b, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    if PRECISE:
        return dot_fp32(a, b, PRECISION)
    return dot(_near(a), _near(b))


@triton.jit
def _fine_product(a, b, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b with about 16 bits of a, whose entries cancel, and b in bfloat16."""
    if PRECISE:
        return dot_fp32(a, b, PRECISION)
    high, low = high_low(a)
    b = _near(b)
    return add_dot(dot(low, b), high, b)


@triton.jit
def _finer_product(a, b, PRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """a @ b with about 16 bits of both."""
    if PRECISE:
        return dot_fp32(a, b, PRECISION)
    high, low = high_low(a)
    b_high, b_low = high_low(b)
    return add_dot(add_dot(dot(low, b_high), high, b_low), high, b_high)


@triton.jit
def _invert(lower):
    """(I + lower)^-1 of a strictly lower triangular [BLOCK, BLOCK] matrix, by forward substitution in float32."""
    lane = tl.arange(0, BLOCK)
    x = -lower
    for i in range(1, BLOCK):
        chosen = (lane == i)[:, None]
        row = tl.sum(tl.where(chosen, x, 0.0), 0)
        row = row + tl.sum(row[:, None] * x, 0)
        x = tl.where(chosen, row[None, :], x)
    return x + tl.where(lane[:, None] == lane[None, :], 1.0, 0.0)


@triton.jit
def _redo_rows(keys, queries, kk, qk, slow, steep, lane):
    """Pairs of a block whose row decays by more than 2^-LIMIT, with factors of at most 1."""
    far = (tl.min(slow + steep, 1) < -LIMIT).to(tl.int32)
    if tl.max(far, 0) > 0:
        for i in range(0, BLOCK):
            if tl.max(tl.where(lane == i, far, 0), 0) > 0:
                since = (_row(slow, lane, i)[None, :] - slow) + (_row(steep, lane, i)[None, :] - steep)
                decayed = keys * tl.exp2(tl.minimum(since, 0.0))
                here = (lane == i)[:, None]
                kk = tl.where(here, tl.sum(decayed * _row(keys, lane, i)[None, :], 1)[None, :], kk)
                qk = tl.where(here, tl.sum(decayed * _row(queries, lane, i)[None, :], 1)[None, :], qk)
    return kk, qk


@triton.jit
def _block(
    p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, first, count, head, group, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h,
    K: tl.constexpr, V: tl.constexpr, GATE: tl.constexpr, LOGITS: tl.constexpr, L2NORM: tl.constexpr,
    PRECISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tokens first .. first + count - 1, at most BLOCK of them, by themselves.

    Returns keys and queries decayed from the block's start [BLOCK, K], keys decayed to its end, the block's decay [K],
    T and aq [BLOCK, BLOCK], v [BLOCK, V], b n^2, b n and the scale left on q [BLOCK]. Other rows act as b = 0,
    g = 0.
    """
    lane = tl.arange(0, BLOCK)
    channels = tl.arange(0, K)
    valid = lane < count
    rows = valid[:, None]
    token = first + lane
    values = tl.arange(0, V)
    key_head = head // group
    g = tl.load(p_g + token[:, None] * g_t + head * g_h + channels[None, :], mask=rows, other=0.0)
    k = tl.load(p_k + token[:, None] * k_t + key_head * k_h + channels[None, :], mask=rows, other=0.0)
    q = tl.load(p_q + token[:, None] * q_t + key_head * q_h + channels[None, :], mask=rows, other=0.0)
    b = tl.load(p_beta + token * b_t + head * b_h, mask=valid, other=0.0).to(tl.float32)
    v = tl.load(p_v + token[:, None] * v_t + head * v_h + values[None, :], mask=rows, other=0.0)
    bias = gate_bias(p_dt_bias, head, channels, K)[None, :]
    g = log_decay(g.to(tl.float32), bias, p_a_log, lower_bound, head, GATE, LOG2_E)
    if GATE != BOUNDED:
        g = tl.where(g < -192.0, -192.0, g)  # 2^-192 is 0; deeper only loses digits of what follows
    g = tl.where(rows, g, 0.0)
    steep = tl.zeros([BLOCK, K], tl.float32)
    if PRECISE and GATE != BOUNDED:  # summed apart, lest they take the digits of the slow decays around them
        steep = tl.where(g < -8.0, g, 0.0)
        g = g - steep
        steep = tl.cumsum(steep, 0)
    slow = tl.cumsum(g, 0)
    local = slow + steep
    whole = tl.sum(g, 0)
    near = tl.exp2(local)
    keys, key_size = _unit(k.to(tl.float32), L2NORM)
    queries, query_size = _unit(q.to(tl.float32), L2NORM)
    b_value = tl.where(valid, write_strength(b, beta_scale, LOGITS), 0.0) * key_size
    b_key = b_value * key_size

    steep_whole = _row(steep, lane, BLOCK - 1)
    decay = tl.exp2(whole + steep_whole)
    near_keys = keys * near
    near_queries = queries * near
    if GATE == BOUNDED:
        past = keys * tl.exp2(-local)
        end_keys = past * decay[None, :]
    else:
        past = keys * tl.exp2(tl.minimum(-local, LIMIT))
        end_keys = keys * tl.exp2((whole[None, :] - slow) + (steep_whole[None, :] - steep))
    past = tl.trans(past)
    kk = _product(near_keys, past, PRECISE, PRECISION)
    qk = _product(near_queries, past, PRECISE, PRECISION)
    if GATE != BOUNDED:
        kk, qk = _redo_rows(keys, queries, kk, qk, slow, steep, lane)
    inverse = _invert(tl.where(lane[:, None] > lane[None, :], kk * b_key[:, None], 0.0))
    aq = tl.where(lane[:, None] >= lane[None, :], qk, 0.0)
    return near_keys, near_queries, end_keys, decay, inverse, aq, v.to(tl.float32), b_key, b_value, query_size


@triton.jit
def _store_rows(
    p_bf16, p_fp16, p_fp32, record, block, wk, qd, uv, q_scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Write a block's rows of a record."""
    lane = tl.arange(0, BLOCK) + block * BLOCK
    key_offset = lane[:, None] * K + tl.arange(0, K)[None, :]
    value_offset = 3 * C * K + lane[:, None] * V + tl.arange(0, V)[None, :]
    MATRICES: tl.constexpr = 3 * C * K + C * V + C * C
    if PRECISE:
        p_record = p_fp32 + record * 64
        p_vectors = p_record + MATRICES
        tl.store(p_record + key_offset, wk)
        tl.store(p_record + C * K + key_offset, qd)
        tl.store(p_record + value_offset, uv)
    else:
        p_near = p_bf16 + record * 128
        p_fine = p_fp16 + record * 128
        p_vectors = p_fp32 + record * 64 + MATRICES // 2
        tl.store(p_near + key_offset, narrow(wk, tl.bfloat16))
        tl.store(p_near + C * K + key_offset, narrow(qd, tl.bfloat16))
        size, inverse_size = power_of_two(tl.max(tl.abs(uv), 1), -100, 110)  # float16 has few exponents
        tl.store(p_fine + value_offset, narrow(uv * (inverse_size * 16384.0)[:, None], tl.float16))
        tl.store(p_vectors + K + lane, size / 16384.0)
    tl.store(p_vectors + K + C + lane, q_scale)


@triton.jit
def _store_end_keys(
    p_fp16, p_fp32, record, block, kr,
    K: tl.constexpr, C: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Write a block's rows of kr."""
    offset = (tl.arange(0, BLOCK) + (2 * C + block * BLOCK))[:, None] * K + tl.arange(0, K)[None, :]
    if PRECISE:
        tl.store(p_fp32 + record * 64 + offset, kr)
    else:
        tl.store(p_fp16 + record * 128 + offset, narrow(kr, tl.float16))


@triton.jit
def _store_pairs(
    p_fp16, p_fp32, record, row_block, column_block, aq,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Write one block of aq."""
    lane = tl.arange(0, BLOCK)
    offset = 3 * C * K + C * V + (lane + row_block * BLOCK)[:, None] * C + (lane + column_block * BLOCK)[None, :]
    if PRECISE:
        tl.store(p_fp32 + record * 64 + offset, aq)
    else:
        tl.store(p_fp16 + record * 128 + offset, narrow(aq, tl.float16))


@triton.jit(do_not_specialize=["tile_table", "tiles", "record_start", "heads", "group"])
def prepare_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, p_table, p_bf16, p_fp16, p_fp32,
    tile_table, tiles, record_start, heads, group, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h,
    GATE: tl.constexpr, LOGITS: tl.constexpr, L2NORM: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, RECORD: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one value head. Grid (tiles * HV); RECORD and record_start in units of 256 bytes."""
    tile = tl.program_id(0) // heads
    head = (tl.program_id(0) % heads).to(tl.int64)
    count = tl.load(p_table + tile_table + tiles + tile)
    first = tl.load(p_table + tile_table + tile).to(tl.int64)
    if count == 0:
        return
    record = record_start + (tile.to(tl.int64) * heads + head) * RECORD
    wk_operand, qd, kr, decay, inverse, aq, v, b_key, b_value, q_scale = _block(
        p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, first, count, head, group, beta_scale, lower_bound,
        q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h, K, V, GATE, LOGITS, L2NORM, PRECISE, PRECISION,
    )  # fmt: skip
    wk = _fine_product(inverse * b_key[None, :], wk_operand, PRECISE, PRECISION)
    uv = _fine_product(inverse * b_value[None, :], v, PRECISE, PRECISION)
    _store_pairs(p_fp16, p_fp32, record, 0, 0, aq, K, V, C, PRECISE)
    _store_rows(p_bf16, p_fp16, p_fp32, record, 0, wk, qd, uv, q_scale * scale, K, V, C, PRECISE)
    if C > BLOCK:
        past = tl.trans(kr)
        if not PRECISE:
            past = _near(past)
            wk = _near(wk)
        tl.debug_barrier()  # holds back the second block's loads, which would take the first one's registers
        near_keys, near_queries, end_keys, decay2, inverse2, aq2, v2, b_key2, b_value2, q_scale2 = _block(
            p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, first + BLOCK, count - BLOCK, head, group, beta_scale,
            lower_bound, q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h,
            K, V, GATE, LOGITS, L2NORM, PRECISE, PRECISION,
        )  # fmt: skip
        kk = _product(near_keys, past, PRECISE, PRECISION) * b_key2[:, None]
        qk = _product(near_queries, past, PRECISE, PRECISION)
        link = dot_fp32(inverse2, kk, PRECISION)
        wk2 = _fine_product(inverse2 * b_key2[None, :], near_keys * decay[None, :], PRECISE, PRECISION)
        wk2 -= _fine_product(link, wk, PRECISE, PRECISION)
        uv2 = _fine_product(inverse2 * b_value2[None, :], v2, PRECISE, PRECISION)
        uv2 -= _finer_product(link, uv, PRECISE, PRECISION)
        qd2 = near_queries * decay[None, :]
        _store_pairs(p_fp16, p_fp32, record, 0, 1, tl.zeros_like(qk), K, V, C, PRECISE)
        _store_pairs(p_fp16, p_fp32, record, 1, 0, qk, K, V, C, PRECISE)
        _store_pairs(p_fp16, p_fp32, record, 1, 1, aq2, K, V, C, PRECISE)
        _store_rows(p_bf16, p_fp16, p_fp32, record, 1, wk2, qd2, uv2, q_scale2 * scale, K, V, C, PRECISE)
        _store_end_keys(p_fp16, p_fp32, record, 1, end_keys, K, C, PRECISE)
        kr = kr * decay2[None, :]
        decay = decay * decay2
    _store_end_keys(p_fp16, p_fp32, record, 0, kr, K, C, PRECISE)
    MATRICES: tl.constexpr = 3 * C * K + C * V + C * C
    p_decay = p_fp32 + record * 64 + (MATRICES if PRECISE else MATRICES // 2)
    tl.store(p_decay + tl.arange(0, K), decay)
