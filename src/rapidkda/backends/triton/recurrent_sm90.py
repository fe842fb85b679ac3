"""Decode of bfloat16 states on compute capability 9.0, in Gluon: three fifths of the portable kernel's instructions.

A program is one warp and owns VB value rows of one head of one request, as there. With two bytes an element the
arithmetic counts: both sums over a row, with the key and with the query, are products of the matrix units. The state
is exact in bfloat16; key and query, times their decay, enter as two parts, 16 bits of mantissa. The norms of both are
factors of the sums, which do not wait for them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from . import launch
from .blocks import (
    L2_EPS,
    amplitude_of,
    exp,
    gate_decay,
    high_low,
    narrow,
    spread,
    take_turn,
    usable,
    widened,
    within,
    write_strength,
)

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
VALUE = gl.constexpr(gl.SliceLayout(1, LEFT))  # value rows as the products leave them
CHANNEL = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])))
PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))  # the least that an asynchronous copy takes: 4 bytes
SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # halves of 64 channels, one after the other
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))  # of a state, in memory order
ROW = gl.constexpr(gl.SliceLayout(1, TILE))
COLUMN = gl.constexpr(gl.SliceLayout(0, TILE))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _sums(state_s, vectors_s, key, query, VB: gl.constexpr, K: gl.constexpr):
    """Sums [VB] over the channels of the rows of a state, by `key` and by `query`."""
    zero = gl.zeros([K], gl.bfloat16, CHANNEL)
    key_high, key_low = high_low(key)
    query_high, query_low = high_low(query)
    keys = gl.join(gl.join(key_high, zero), gl.join(key_low, zero))
    queries = gl.join(gl.join(query_high, zero), gl.join(query_low, zero))
    vectors_s.store(gl.permute(gl.reshape(gl.join(keys, queries), [K, 8]), (1, 0)))
    async_copy.wait_group(0)
    vectors = vectors_s.permute((1, 0)).load(RIGHT)
    sums = mma_v2(state_s.load(LEFT), vectors, gl.zeros([VB, 8], gl.float32, MMA))
    by_key, by_query = gl.split(gl.reshape(sums, [VB, 4, 2]))
    return gl.convert_layout(gl.sum(by_key, 1), VALUE), gl.convert_layout(gl.sum(by_query, 1), VALUE)


@gluon.jit(do_not_specialize=["tokens", "pool_rows", "pad_slot"], do_not_specialize_on_alignment=launch.TABLES)
def step_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, p_out, p_pool, p_first, p_length, p_read, p_write,
    tokens, pool_rows, pad_slot, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h, o_t, o_h, first_s, length_s, read_s, write_s, pool_s,
    GATE: gl.constexpr, LOGITS: gl.constexpr, L2NORM: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    VB: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Decode as `recurrent`'s, of states [.., HEADS, V, K] in bfloat16. Grid (N * HEADS * V / VB)."""
    n = gl.program_id(0) // (V // VB * HEADS)
    head = gl.program_id(0) // (V // VB) % HEADS
    rows = gl.program_id(0) % (V // VB) * VB
    state_s = gl.allocate_shared_memory(gl.bfloat16, [VB, K], SHARED)
    q_s = gl.allocate_shared_memory(p_q.dtype.element_ty, [K], VECTOR)
    k_s = gl.allocate_shared_memory(p_k.dtype.element_ty, [K], VECTOR)
    g_s = gl.allocate_shared_memory(p_g.dtype.element_ty, [K], VECTOR)
    v_s = gl.allocate_shared_memory(p_v.dtype.element_ty, [VB], VECTOR)
    decay_s = gl.allocate_shared_memory(gl.float32, [K], VECTOR)
    key_s = gl.allocate_shared_memory(gl.float32, [K], VECTOR)
    vectors_s = gl.allocate_shared_memory(gl.bfloat16, [8, K], SHARED)
    p_q += spread(head // GROUP, q_h)
    p_k += spread(head // GROUP, k_h)
    p_g += spread(head, g_h)
    p_v += spread(head, v_h) + rows
    p_beta += spread(head, b_h)
    row = gl.arange(0, VB, ROW)[:, None]
    p_state = p_pool + (head * V + rows) * K + (row * K + gl.arange(0, K, COLUMN)[None, :])

    take_turn()
    slot = gl.load(p_read + spread(n, read_s))
    target = gl.load(p_write + spread(n, write_s))
    first, count = within(gl.load(p_first + spread(n, first_s)), gl.load(p_length + spread(n, length_s)), tokens)
    some = count > 0
    real = some & usable(slot, pool_rows, pad_slot) & usable(target, pool_rows, pad_slot)
    # No branch on `real`: the compiler would move reads from before it, and from different places in it, behind it
    channel = gl.arange(0, K, CHANNEL)
    async_copy.async_copy_global_to_shared(g_s, p_g + spread(first, g_t) + channel, mask=real)
    async_copy.async_copy_global_to_shared(k_s, p_k + spread(first, k_t) + channel, mask=real)
    async_copy.async_copy_global_to_shared(q_s, p_q + spread(first, q_t) + channel, mask=real)
    async_copy.async_copy_global_to_shared(v_s, p_v + spread(first, v_t) + gl.arange(0, VB, PAIRS), mask=real)
    async_copy.commit_group()
    async_copy.async_copy_global_to_shared(state_s, p_state + spread(slot, pool_s), mask=real)
    async_copy.commit_group()
    b = gl.load(p_beta + spread(first, b_t), mask=real)
    bias = gl.zeros([K], gl.float32, CHANNEL)
    if p_dt_bias is not None:
        bias = gl.load(p_dt_bias + head * K + channel)
    a_log = 0.0
    if p_a_log is not None:
        a_log = gl.load(p_a_log + head)
    amplitude = amplitude_of(a_log)
    async_copy.wait_group(1)
    q, k = widened(q_s.load(CHANNEL)), widened(k_s.load(CHANNEL))
    decay = exp(gate_decay(widened(g_s.load(CHANNEL)), bias, amplitude, lower_bound, GATE, 1.0))
    decay_s.store(decay)
    key_s.store(k)
    by_key, by_query = _sums(state_s, vectors_s, k * decay, q * decay, VB, K)
    key_size = 1.0
    if L2NORM:
        key_size = gl.rsqrt(gl.sum(k * k, 0) + L2_EPS)
        scale *= gl.rsqrt(gl.sum(q * q, 0) + L2_EPS)
    b = write_strength(b.to(gl.float32), beta_scale, LOGITS)
    u = b * (v_s.load(VALUE).to(gl.float32) - by_key * key_size) * key_size
    out = gl.where(real, (by_query + u * gl.sum(q * k, 0)) * scale, 0.0)
    p_row = p_out + (spread(first, o_t) + spread(head, o_h) + rows) + gl.arange(0, VB, VALUE)
    gl.store(p_row, narrow(out, p_out.dtype.element_ty), mask=some)
    state = widened(state_s.load(TILE)) * decay_s.load(COLUMN)[None, :]
    state += gl.convert_layout(u, ROW)[:, None] * key_s.load(COLUMN)[None, :]
    gl.store(p_state + spread(target, pool_s), narrow(state, gl.bfloat16), mask=real, cache_modifier=".cs")
