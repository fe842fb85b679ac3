"""The preparation on compute capability 9.0, in Gluon: the same records, from inputs that come and go in whole rows.

What Triton decides is said here. A tile's keys, gates and queries are copied to shared memory all at once, in whole
rows, so that nothing waits but for the table and for these; the records take their place there and leave in whole rows
as well. In between a thread owns columns: sums along tokens stay within it. Products read their operands from shared
memory. `prepare` remains the judge, and serves what copies of 16 bytes cannot.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .blocks import (
    BOUNDED,
    L2_EPS,
    LOG2_E,
    amplitude,
    exp2,
    exp2_of_negative,
    gate_decay,
    high_low,
    narrow,
    spread,
    widened,
    write_strength,
)
from .prepare import LIMIT, C

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
ROW = gl.constexpr(gl.SliceLayout(1, MMA))
COLUMN = gl.constexpr(gl.SliceLayout(0, MMA))
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # halves of 64 channels, one after the other
SLICE = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0]))  # of 32 channels, for what is redone
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _gram(total, a, b):
    """total + a @ b^T of operands in shared memory."""
    return mma_v2(a.load(LEFT), b.permute((1, 0)).load(RIGHT), total)


@gluon.jit
def _squares(x):
    """Squared norms of the rows of x in shared memory."""
    products = _gram(gl.zeros([C, C], gl.float32, MMA), x, x)
    row, column = gl.arange(0, C, ROW), gl.arange(0, C, COLUMN)
    return gl.sum(gl.where(row[:, None] == column[None, :], products, 0.0), 1)


@gluon.jit
def _right(x):
    """x [C, C] as the second operand. Blocks of 8 x 8 are transposed between the threads of a warp, which is what the
    layouts differ by."""
    x = tl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )
    x = gl.permute(gl.reshape(x, [2, 8, 2, 8]), [0, 3, 2, 1])
    return gl.convert_layout(gl.reshape(x, [C, C]), RIGHT, assert_trivial=True)


@gluon.jit
def _exact_product(a, b):
    """As `prepare`'s."""
    a_high, a_low = high_low(a)
    b_high, b_low = high_low(b)
    a_high, a_low = gl.convert_layout(a_high, LEFT), gl.convert_layout(a_low, LEFT)
    b_high, b_low = _right(b_high), _right(b_low)
    total = mma_v2(a_low, b_high, gl.zeros([C, C], gl.float32, MMA))
    return mma_v2(a_high, b_high, mma_v2(a_high, b_low, total))


@gluon.jit
def _merge(x, lower):
    return x - _exact_product(x, _exact_product(lower, x))


@gluon.jit
def _invert(lower):
    """As `prepare`'s."""
    row = gl.arange(0, C, ROW)[:, None]
    column = gl.arange(0, C, COLUMN)[None, :]
    small = gl.where(row // 4 == column // 4, lower, 0.0)
    square = _exact_product(small, small)
    x = gl.where(row == column, 1.0, 0.0) - small + square - _exact_product(small, square)
    same = row // 8 == column // 8
    x = _merge(x, gl.where(same & (row // 4 != column // 4), lower, 0.0))
    return _merge(x, gl.where(same, 0.0, lower))


@gluon.jit
def _fetch(stage, p_x, stride, count, K: gl.constexpr):
    """Start copying the rows of a tile; past its end the last one again."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [1, 1], [1, 0])
    row = gl.minimum(gl.arange(0, C, gl.SliceLayout(1, ROWS)), count - 1)
    p_row = p_x + gl.arange(0, K, gl.SliceLayout(0, ROWS))
    async_copy.async_copy_global_to_shared(stage, p_row[None, :] + spread(row, stride)[:, None])
    async_copy.commit_group()


@gluon.jit
def _half(stage, part, DTYPE: gl.constexpr, K: gl.constexpr):
    """Channels part * K / 2 and on of a stage."""
    return stage._reinterpret(DTYPE, [2, C, K // 2], SHARED).index(part)


@gluon.jit
def _store_rows(p_record, stage, K: gl.constexpr):
    """Write out what a stage holds."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [1, 1], [1, 0])
    row = gl.arange(0, C, gl.SliceLayout(1, ROWS))[:, None]
    channel = gl.arange(0, K, gl.SliceLayout(0, ROWS))[None, :]
    gl.store(p_record + (row * K + channel), stage._reinterpret(gl.bfloat16, [C, K], SHARED).load(ROWS))


@gluon.jit
def _store_pairs(p_pairs, x):
    """Write both parts of a matrix [C, C], the low one past the high parts of P and T."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0])
    row = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None]
    column = gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :]
    high, low = high_low(x)
    gl.store(p_pairs + (row * C + column), gl.convert_layout(high, WIDE))
    gl.store(p_pairs + 2 * C * C + (row * C + column), gl.convert_layout(low, WIDE))


@gluon.jit
def _row(x, rows, row):
    """x[row] of x [R, K]."""
    return gl.sum(gl.where((rows == row)[:, None], x, 0.0), 0)


@gluon.jit
def _totals(p_g, rows, channels, p_dt_bias, size, head, valid, GATE: gl.constexpr, K: gl.constexpr):
    """Decays summed inside a tile [C, 32], of unbounded gates."""
    bias = gl.zeros([32], gl.float32, gl.SliceLayout(0, SLICE))
    if p_dt_bias is not None:
        bias = gl.load(p_dt_bias + head * K + channels)
    g = gate_decay(widened(gl.load(p_g + rows + channels[None, :])), bias[None, :], size, 0.0, GATE, LOG2_E)
    g = gl.where(g < -192.0, -192.0, g)
    return gl.associative_scan(gl.where(valid, g, 0.0), 0, _sum)


@gluon.jit
def _redo_rows(
    kk, qk, inverse_s, p_q, p_k, p_g, p_dt_bias, q_t, k_t, g_t, size, count, head,
    GATE: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Pairs of a tile whose row decays by more than 2^-LIMIT, with factors of at most 1. Read again from global memory,
    so that other tiles need not hold for it what they are done with."""
    EACH: gl.constexpr = gl.SliceLayout(1, SLICE)
    row = gl.arange(0, C, EACH)
    valid = (row < count)[:, None]
    real = gl.minimum(row, count - 1)
    q_rows = spread(real, q_t)[:, None]
    k_rows = spread(real, k_t)[:, None]
    g_rows = spread(real, g_t)[:, None]
    least = gl.zeros([C], gl.float32, EACH)
    for part in range(0, K // 32):
        channels = gl.arange(0, 32, gl.SliceLayout(0, SLICE)) + part * 32
        total = _totals(p_g, g_rows, channels, p_dt_bias, size, head, valid, GATE, K)
        least = gl.minimum(least, gl.min(total, 1))
    far = (least < -LIMIT).to(gl.int32)
    kk_far = gl.zeros([C, C], gl.float32, MMA)
    qk_far = gl.zeros([C, C], gl.float32, MMA)
    for part in range(0, K // 32):
        channels = gl.arange(0, 32, gl.SliceLayout(0, SLICE)) + part * 32
        total = _totals(p_g, g_rows, channels, p_dt_bias, size, head, valid, GATE, K)
        keys = widened(gl.load(p_k + k_rows + channels[None, :])) * inverse_s.load(EACH)[:, None]
        queries = widened(gl.load(p_q + q_rows + channels[None, :]))
        for i in range(0, C):
            if gl.max(gl.where(row == i, far, 0), 0) > 0:
                decayed = keys * exp2(gl.minimum(_row(total, row, i)[None, :] - total, 0.0))
                here = (gl.arange(0, C, ROW) == i)[:, None]
                k_sums = gl.convert_layout(gl.sum(decayed * _row(keys, row, i)[None, :], 1), COLUMN)
                q_sums = gl.convert_layout(gl.sum(decayed * _row(queries, row, i)[None, :], 1), COLUMN)
                kk_far += gl.where(here, k_sums[None, :], 0.0)
                qk_far += gl.where(here, q_sums[None, :], 0.0)
    redone = (gl.convert_layout(far, ROW) > 0)[:, None]
    return gl.where(redone, kk_far, kk), gl.where(redone, qk_far, qk)


@gluon.jit(do_not_specialize=["tile_table", "tiles", "record_start"])
def prepare_kernel(
    p_q, p_k, p_g, p_beta, p_a_log, p_dt_bias, p_table, p_bf16, p_fp32,
    tile_table, tiles, record_start, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, g_t, g_h, b_t, b_h,
    GATE: gl.constexpr, LOGITS: gl.constexpr, L2NORM: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    CHANNELS: gl.constexpr, RECORD: gl.constexpr, PRECISE: gl.constexpr, PRECISION: gl.constexpr,
):  # fmt: skip
    """As `prepare`'s, for half-precision inputs of 128 channels, by one warp."""
    HALF: gl.constexpr = K // 2
    OWN: gl.constexpr = gl.BlockedLayout([C, 2], [1, 32], [1, 1], [1, 0])  # of a half: columns
    EACH: gl.constexpr = gl.SliceLayout(1, OWN)
    CHANNEL: gl.constexpr = gl.SliceLayout(0, OWN)
    INPUT: gl.constexpr = p_q.dtype.element_ty
    PAIRS: gl.constexpr = 3 * C * K
    VECTORS: gl.constexpr = PAIRS + 4 * C * C
    UNIT: gl.constexpr = 1.0 if GATE == BOUNDED else LOG2_E
    heads = gl.num_programs(0)
    head = gl.program_id(0).to(gl.int64)
    tile = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    if tile >= tiles:
        return
    entry = gl.load(p_table + tile_table + tile)
    first = entry & 0xFFFFFFFF
    count = (entry >> 32).to(gl.int32)
    if count == 0:
        return
    keys_s = gl.allocate_shared_memory(INPUT, [C, K], SHARED)
    gates_s = gl.allocate_shared_memory(INPUT, [C, K], SHARED)
    queries_s = gl.allocate_shared_memory(INPUT, [C, K], SHARED)
    bias_s = gl.allocate_shared_memory(gl.float32, [2, HALF], VECTOR)
    level_s = gl.allocate_shared_memory(gl.float32, [C], VECTOR)
    inverse_s = gl.allocate_shared_memory(gl.float32, [C], VECTOR)
    key_head = head // GROUP
    _fetch(keys_s, p_k + (first * k_t + key_head * k_h), k_t, count, K)
    _fetch(gates_s, p_g + (first * g_t + head * g_h), g_t, count, K)
    _fetch(queries_s, p_q + (first * q_t + key_head * q_h), q_t, count, K)
    if p_dt_bias is not None:
        channel = gl.arange(0, K, gl.BlockedLayout([4], [32], [1], [0]))
        async_copy.async_copy_global_to_shared(
            bias_s._reinterpret(gl.float32, [K], VECTOR), p_dt_bias + (head * K + channel)
        )
    async_copy.commit_group()
    record = record_start + (tile.to(gl.int64) * heads + head) * RECORD
    p_record = p_bf16 + record * 128
    p_vectors = p_fp32 + record * 64 + VECTORS // 2
    size = 1.0
    if p_a_log is not None:
        size = amplitude(p_a_log, head)
    lane = gl.arange(0, C, ROW)
    valid = lane < count
    b = gl.load(p_beta + (first * b_t + head * b_h) + spread(gl.minimum(lane, count - 1), b_t)).to(gl.float32)
    b = gl.where(valid, write_strength(b, beta_scale, LOGITS), 0.0)
    # What a row's gates are multiplied by: nothing decays past the end
    level_s.store(gl.where(valid, lower_bound * LOG2_E if GATE == BOUNDED else 1.0, 0.0))

    async_copy.wait_group(3)
    squares = _squares(keys_s)
    bits = ((squares.to(gl.int32, bitcast=True) >> 23) + 127) >> 1 << 23  # see `prepare`
    inverse_s.store((0x7F000000 - bits).to(gl.float32, bitcast=True))
    key_size = bits.to(gl.float32, bitcast=True)
    if L2NORM:
        key_size *= gl.rsqrt(squares + L2_EPS)
    gl.store(p_vectors + K + lane, key_size)
    b_value = b * key_size
    b_key = b_value * key_size
    async_copy.wait_group(0)
    query_size = gl.zeros([C], gl.float32, ROW) + scale
    if L2NORM:
        query_size *= gl.rsqrt(_squares(queries_s) + L2_EPS)
    gl.store(p_vectors + K + C + lane, query_size)

    kk = gl.zeros([C, C], gl.float32, MMA)
    qk = gl.zeros([C, C], gl.float32, MMA)
    least = gl.zeros([HALF], gl.float32, CHANNEL)
    for part in range(0, 2):
        keys = _half(keys_s, part, gl.bfloat16, K)
        queries = _half(queries_s, part, gl.bfloat16, K)
        rest = _half(gates_s, part, gl.bfloat16, K)
        g = widened(_half(gates_s, part, INPUT, K).load(OWN))
        k = widened(_half(keys_s, part, INPUT, K).load(OWN)) * inverse_s.load(EACH)[:, None]
        q = widened(_half(queries_s, part, INPUT, K).load(OWN))
        level = level_s.load(EACH)[:, None]
        bias = gl.zeros([HALF], gl.float32, CHANNEL)
        if p_dt_bias is not None:
            bias = bias_s.index(part).load(CHANNEL)
        gl.thread_barrier()  # what follows is written over what was read
        if GATE == BOUNDED:
            g = gate_decay(g, bias[None, :], size, level, GATE, UNIT)
        else:
            g = gate_decay(g, bias[None, :], size, 0.0, GATE, UNIT)
            g = gl.where(g < -192.0, -192.0, g) * level
        total = gl.associative_scan(g, 0, _sum)
        own = gl.arange(0, C, EACH)[:, None]
        whole = gl.sum(gl.where(own == C - 1, total, 0.0), 0)
        decay = exp2(whole)
        near = exp2(total)
        stored = narrow(k * near, gl.bfloat16)
        if GATE == BOUNDED:
            past = k * exp2_of_negative(total)
            end = past * decay[None, :]
        else:
            least = gl.minimum(least, whole)
            past = k * exp2(gl.minimum(-total, LIMIT))
            end = k * exp2(whole[None, :] - total)
        keys.store(stored)
        queries.store(narrow(q * near, gl.bfloat16))
        rest.store(narrow(past, gl.bfloat16))
        kk = _gram(kk, keys, rest)
        qk = _gram(qk, queries, rest)
        rest.store(narrow(end - widened(stored), gl.bfloat16))
        gl.store(p_vectors + (part * HALF + gl.arange(0, HALF, CHANNEL)), decay)
    _store_rows(p_record, queries_s, K)
    _store_rows(p_record + C * K, keys_s, K)
    _store_rows(p_record + 2 * C * K, gates_s, K)
    if GATE != BOUNDED:
        if gl.min(least, 0) < -LIMIT:
            kk, qk = _redo_rows(
                kk, qk, inverse_s, p_q + (first * q_t + key_head * q_h), p_k + (first * k_t + key_head * k_h),
                p_g + (first * g_t + head * g_h), p_dt_bias, q_t, k_t, g_t, size, count, head, GATE, K,
            )  # fmt: skip
    column = gl.arange(0, C, COLUMN)[None, :]
    lower = gl.where(lane[:, None] > column, kk * b_key[:, None], 0.0)
    t = _invert(lower) * gl.convert_layout(b_value, COLUMN)[None, :]
    _store_pairs(p_record + PAIRS, _exact_product(gl.where(lane[:, None] >= column, qk, 0.0), t))
    _store_pairs(p_record + PAIRS + C * C, t)
