"""Verification by replay on compute capability 9.0, in Gluon: a request's tokens as one small chunk (see chunk.py).

A program owns one head of one request. The keys of the records are decayed to the last of them, the keys and queries of
the tokens (X) from the state to each; then every warp works on value rows of its own:

    S <- S G + U' K         stored where the records are full
    W = S X'                from which the corrections follow by substitution, a value row a thread

Both are products of the matrix units, of operands in two bfloat16 parts each, 16 bits of mantissa. The state comes to
shared memory in pieces of some channels, one after another, while everything that needs no state is computed: asked for
at once, its copies would hold up what the warps read and exchange through shared memory meanwhile.

In a product the channels of 16 have another order (`_in_order`): then four neighbours in memory are a thread's.
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
from .chunk import put

WARPS = gl.constexpr(4)
PIECES = gl.constexpr(4)  # of a state
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _stack(items):
    """Tensors [K], a power of two of them, as the columns of one."""
    count: gl.constexpr = len(items)
    size: gl.constexpr = items[0].shape[0]
    for _ in gl.static_range(5):
        if len(items) > 1:
            joined = ()
            for i in gl.static_range(len(items) // 2):
                joined += (gl.join(items[i], items[len(items) // 2 + i]),)
            items = joined
    return gl.reshape(items[0], [size, count])


@gluon.jit
def _columns(x):
    """The columns of x, a power of two of them."""
    size: gl.constexpr = x.shape[0]
    items = (x,)
    for _ in gl.static_range(5):
        if items[0].shape[1] > 1:
            halves = ()
            for i in gl.static_range(len(items)):
                halves += gl.split(gl.permute(gl.reshape(items[i], [size, 2, items[i].shape[1] // 2]), (0, 2, 1)))
            items = halves
    result = ()
    for i in gl.static_range(len(items)):
        result += (gl.reshape(items[i], [size]),)
    return result


@gluon.jit
def _above(x, y):
    """x over y, both [R, C]."""
    return gl.reshape(gl.permute(gl.join(x, y), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@gluon.jit
def _in_order(x):
    """Columns of x as the products have them: of 4 neighbours, two and two are 8 apart."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [R, C // 16, 4, 2, 2]), (0, 1, 3, 2, 4)), [R, C])


@gluon.jit
def _in_memory(x):
    """`_in_order`, undone."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [R, C // 16, 2, 4, 2]), (0, 1, 3, 2, 4)), [R, C])


@gluon.jit
def _rows_in_order(x):
    """`_in_order` of rows."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [R // 16, 4, 2, 2, C]), (0, 2, 1, 3, 4)), [R, C])


@gluon.jit
def _scalar(vector_s, at: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.sum(vector_s.slice(at, 1).load(ONE), 0)


@gluon.jit
def _copy(piece_s, p_piece, real):
    async_copy.async_copy_global_to_shared(piece_s, p_piece, mask=real)
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=["tokens", "pool_rows", "pad_slot", "positions"], do_not_specialize_on_alignment=launch.TABLES
)
def replay_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, p_out, p_pool, p_records,
    p_first, p_length, p_slot, p_accepted, p_held,
    tokens, pool_rows, pad_slot, positions, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h, o_t, o_h,
    first_s, length_s, slots_s, accepted_s, pool_s, records_s, records_j,
    GATE: gl.constexpr, LOGITS: gl.constexpr, L2NORM: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, FOLD: gl.constexpr,
    SPREAD: gl.constexpr,
):  # fmt: skip
    """Fold the accepted records, store the state where the new ones do not fit, run the tokens, record them.

    Grid (N * HEADS), WARPS warps. TOKENS (2, 4, 8) bounds the tokens of a request, FOLD (8, 16, 32) the records of a
    slot. SPREAD: the pieces of a state are asked for one after another instead of at once.
    """
    BLOCK: gl.constexpr = 16 * WARPS  # value rows at once
    BLOCKS: gl.constexpr = V // BLOCK
    PIECE: gl.constexpr = K // PIECES
    NARROW: gl.constexpr = p_pool.dtype.element_ty == gl.bfloat16
    N: gl.constexpr = 16 if TOKENS == 8 else 8  # rows of X, twice the same where these are fewer
    DEPTH: gl.constexpr = 16 if FOLD == 8 else FOLD  # records in a product; of 8, it takes both parts
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    STATE: gl.constexpr = gl.SwizzledSharedLayout(16, 2 if NARROW else 1, 2, [1, 0])
    COPY: gl.constexpr = (
        gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
        if NARROW
        else gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    )
    WARP_ROWS: gl.constexpr = [[16, 0], [32, 0]]
    OWN: gl.constexpr = gl.DistributedLinearLayout(  # MMA, in memory order
        [[0, 1], [0, 2], [8, 0], [0, 16]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], WARP_ROWS, [], [BLOCK, PIECE]
    )
    SOLVE: gl.constexpr = gl.DistributedLinearLayout(  # a value row a thread, of those that its warp has in MMA
        [[0, 1], [0, 2], [0, 4], [0, 8]] if N == 16 else [[0, 1], [0, 2], [0, 4]],
        [[1, 0], [2, 0], [4, 0], [8, 0], [64, 0]],
        WARP_ROWS,
        [],
        [V, N],
    )
    VALUE: gl.constexpr = gl.SliceLayout(1, SOLVE)
    CHANNEL: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SHARE: gl.constexpr = max(1, TOKENS // WARPS)  # tokens of a warp
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [SHARE, 32 // SHARE], [WARPS, 1], [1, 0])
    OLD: gl.constexpr = gl.NVMMASharedLayout(2 * DEPTH, 16, 2)
    NEW: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    pieces_s = ()
    for _ in gl.static_range(PIECES):
        pieces_s += (gl.allocate_shared_memory(p_pool.dtype.element_ty, [V, PIECE], STATE),)
    copied = (
        gl.arange(0, V, gl.SliceLayout(1, COPY))[:, None] * K + gl.arange(0, PIECE, gl.SliceLayout(0, COPY))[None, :]
    )
    own = (
        gl.arange(0, BLOCK, gl.SliceLayout(1, OWN))[:, None] * K + gl.arange(0, PIECE, gl.SliceLayout(0, OWN))[None, :]
    )
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, ROWS))
    channel = gl.arange(0, K, gl.SliceLayout(0, ROWS))
    value_row = gl.arange(0, V, VALUE)
    flat = gl.arange(0, K, CHANNEL)
    u_row = gl.arange(0, BLOCK, gl.SliceLayout(1, LEFT))
    u_at = gl.arange(0, DEPTH, gl.SliceLayout(0, LEFT)) % FOLD

    take_turn()
    n = gl.program_id(0) // HEADS
    head = gl.program_id(0) % HEADS
    slot = gl.load(p_slot + spread(n, slots_s))
    accepted = gl.load(p_accepted + spread(n, accepted_s))
    first, count = within(gl.load(p_first + spread(n, first_s)), gl.load(p_length + spread(n, length_s)), tokens)
    count = gl.minimum(gl.minimum(count, positions), TOKENS)
    some = count > 0
    real = some & usable(slot, pool_rows, pad_slot)
    slot = gl.where(real, slot, 0)
    accepted = gl.where(real, gl.minimum(gl.maximum(accepted, 0), positions), 0).to(gl.int32)
    p_state = p_pool + (spread(slot, pool_s) + head * (V * K))
    # All but the state is asked for, last what waits for `held`
    held = 0 * accepted
    if p_held is not None:
        held = gl.load(p_held + (spread(slot, HEADS) + head), mask=accepted > 0, other=0)
    live = token < count
    k_at = p_k + (spread(first, k_t) + spread(head // GROUP, k_h)) + spread(token, k_t)[:, None] + channel[None, :]
    g_at = p_g + (spread(first, g_t) + spread(head, g_h)) + spread(token, g_t)[:, None] + channel[None, :]
    q_at = p_q + (spread(first, q_t) + spread(head // GROUP, q_h)) + spread(token, q_t)[:, None] + channel[None, :]
    k = gl.load(k_at, mask=live[:, None], other=0.0)
    g = gl.load(g_at, mask=live[:, None], other=0.0)
    q = gl.load(q_at, mask=live[:, None], other=0.0)
    b_at = p_beta + (spread(first, b_t) + spread(head, b_h)) + spread(token, b_t)
    b = gl.load(b_at, mask=live, other=0.0).to(gl.float32)
    bias = gl.zeros([K], gl.float32, gl.SliceLayout(0, ROWS))
    if p_dt_bias is not None:
        bias = gl.load(p_dt_bias + head * K + channel)
    a_log = 0.0
    if p_a_log is not None:
        a_log = gl.load(p_a_log + head)
    v_at = p_v + (spread(first, v_t) + spread(head, v_h)) + value_row
    values = ()
    for i in gl.static_range(TOKENS):
        values += (gl.load(v_at + spread(head * 0 + i, v_t), mask=i < count, other=0.0),)
    # How many records count, whether the state is stored, and where the new ones go
    taken = gl.where(accepted > 0, gl.minimum(accepted + gl.minimum(gl.maximum(held, 0), positions), positions), 0)
    if p_held is None:
        full = taken > 0
        base = 0 * taken
    else:
        full = taken + count > positions
        base = gl.where(full, 0, taken)
    p_record = p_records + (spread(slot, records_s) + head * (2 * K + V))
    old_keys = ()
    old_decays = ()
    for j in gl.static_range(FOLD):
        old_at = p_record + spread(head * 0 + j, records_j) + flat
        old_keys += (gl.load(old_at, mask=j < taken, other=0.0),)
        old_decays += (gl.load(old_at + K, mask=j < taken, other=0.0),)
    old_at = p_record + 2 * K + (spread(u_at, records_j)[None, :] + u_row[:, None])
    old_u = ()
    for block in gl.static_range(BLOCKS):
        old_u += (gl.load(old_at + block * BLOCK, mask=(u_at < taken)[None, :], other=0.0),)
    # The compiler would move copies before loads, which would wait for them in line, and what uses the loads before the
    # copies. The barrier stops the one, the branch the other.
    gl.thread_barrier()
    for piece in gl.static_range(1 if SPREAD else PIECES):
        _copy(pieces_s[piece], p_state + piece * PIECE + copied, real)
    if not some:
        return

    k, q = k.to(gl.float32), q.to(gl.float32)
    if L2NORM:
        k *= gl.rsqrt(gl.sum(k * k, 1) + L2_EPS)[:, None]
        q *= gl.rsqrt(gl.sum(q * q, 1) + L2_EPS)[:, None]
    q *= scale
    g = gate_decay(g.to(gl.float32), bias[None, :], amplitude_of(a_log), lower_bound, GATE, 1.0)
    g = gl.where(live[:, None], g, 0.0)
    strength_s = gl.allocate_shared_memory(gl.float32, [TOKENS], FLAT)
    strength_s.store(write_strength(b, beta_scale, LOGITS))
    keys_s = gl.allocate_shared_memory(gl.float32, [TOKENS, K], PLAIN)
    decays_s = gl.allocate_shared_memory(gl.float32, [TOKENS, K], PLAIN)
    keys_s.store(k)
    decays_s.store(exp(g))
    late = gl.full([K], 1.0, gl.float32, CHANNEL)
    late_keys = ()
    for j in gl.static_range(FOLD - 1, -1, -1):
        late_keys = (old_keys[j] * late,) + late_keys
        late *= exp(old_decays[j])
    late_high, late_low = high_low(_stack(late_keys))
    gl.thread_barrier()  # every warp has read the old records and `held` before any of them is overwritten
    new_at = p_record + spread(base + token, records_j)[:, None] + channel[None, :]
    gl.store(new_at, k, mask=(live & real)[:, None])
    gl.store(new_at + K, g, mask=(live & real)[:, None])
    if p_held is not None:
        gl.store(p_held + (spread(slot, HEADS) + head), base, mask=real)

    if SPREAD:  # further pieces, between barriers for the compiler's sake, as above
        _copy(pieces_s[1], p_state + PIECE + copied, real)
        gl.thread_barrier()

    # What tokens see of those before them; their keys and queries, decayed from the state to each
    key_sees = ()
    query_sees = ()
    for i in gl.static_range(TOKENS - 1, -1, -1):
        seen = keys_s.slice(i, 1).load(ROWS)
        key_sees = (gl.sum(k * seen, 1),) + key_sees
        query_sees = (gl.sum(q * seen, 1),) + query_sees
        factor = gl.where((token >= i)[:, None], decays_s.slice(i, 1).load(ROWS), 1.0)
        k *= factor
        q *= factor
        if SPREAD and i == TOKENS // 2:
            gl.thread_barrier()
            _copy(pieces_s[2], p_state + 2 * PIECE + copied, real)
            gl.thread_barrier()
    if SPREAD:
        gl.thread_barrier()
        _copy(pieces_s[3], p_state + 3 * PIECE + copied, real)
    key_sees_s = gl.allocate_shared_memory(gl.float32, [TOKENS * TOKENS], FLAT)
    query_sees_s = gl.allocate_shared_memory(gl.float32, [TOKENS * TOKENS], FLAT)
    key_sees_s.store(gl.reshape(gl.permute(_stack(key_sees), (1, 0)), [TOKENS * TOKENS]))
    query_sees_s.store(gl.reshape(gl.permute(_stack(query_sees), (1, 0)), [TOKENS * TOKENS]))
    late_s = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    late_s.store(late)
    late_high_s = gl.allocate_shared_memory(gl.bfloat16, [K, DEPTH], OLD)
    late_low_s = late_high_s
    if FOLD == 8:
        late_high_s.store(_rows_in_order(gl.reshape(gl.permute(gl.join(late_high, late_low), (0, 2, 1)), [K, 16])))
    else:
        late_low_s = gl.allocate_shared_memory(gl.bfloat16, [K, DEPTH], OLD)
        late_high_s.store(_rows_in_order(late_high))
        late_low_s.store(_rows_in_order(late_low))

    x = _in_order(_above(k, q))
    if TOKENS == 2:
        x = _above(x, x)
    x_high, x_low = high_low(x)
    x_high_s = gl.allocate_shared_memory(gl.bfloat16, [N, K], NEW)
    x_low_s = gl.allocate_shared_memory(gl.bfloat16, [N, K], NEW)
    x_high_s.store(x_high)
    x_low_s.store(x_low)

    u_high = ()
    u_low = ()
    sums = ()
    rest = ()  # of them, products of lower parts: neither waits for the other
    for block in gl.static_range(BLOCKS):
        high, low = high_low(old_u[block])
        u_high += (high,)
        u_low += (low,)
        sums += (gl.zeros([BLOCK, N], gl.float32, MMA),)
        rest += (gl.zeros([BLOCK, N], gl.float32, MMA),)
    for piece in gl.static_range(PIECES):
        async_copy.wait_group(PIECES - 1 - piece)
        late = late_s.slice(piece * PIECE, PIECE).load(gl.SliceLayout(0, OWN))
        keys_high = late_high_s.slice(piece * PIECE, PIECE).permute((1, 0)).load(RIGHT)
        keys_low = late_low_s.slice(piece * PIECE, PIECE).permute((1, 0)).load(RIGHT)
        x_high = x_high_s.slice(piece * PIECE, PIECE, 1).permute((1, 0)).load(RIGHT)
        x_low = x_low_s.slice(piece * PIECE, PIECE, 1).permute((1, 0)).load(RIGHT)
        for block in gl.static_range(BLOCKS):
            state = widened(pieces_s[piece].slice(block * BLOCK, BLOCK).load(OWN)) * late[None, :]
            state = gl.convert_layout(_in_order(state), MMA)
            state = mma_v2(u_high[block], keys_high, state)
            state = mma_v2(u_low[block], keys_high, state)
            if FOLD > 8:
                state = mma_v2(u_high[block], keys_low, state)
            stored = gl.convert_layout(_in_memory(narrow(state, p_pool.dtype.element_ty)), OWN)
            gl.store(p_state + (block * BLOCK * K + piece * PIECE) + own, stored, mask=full)
            high, low = high_low(state)
            high, low = gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT)
            sums = put(sums, block, mma_v2(high, x_high, sums[block]))
            rest = put(rest, block, mma_v2(low, x_high, rest[block]))
            rest = put(rest, block, mma_v2(high, x_low, rest[block]))
    columns = _columns(gl.convert_layout(_above(sums[0] + rest[0], sums[1] + rest[1]), SOLVE))

    left = ()
    outs = ()
    for i in gl.static_range(TOKENS):
        left += (values[i].to(gl.float32) - gl.convert_layout(columns[i], VALUE),)
        outs += (gl.convert_layout(columns[TOKENS + i], VALUE),)
    out_at = p_out + (spread(first, o_t) + spread(head, o_h)) + value_row
    for i in gl.static_range(TOKENS):
        u = left[i] * _scalar(strength_s, i)
        new_u_at = p_record + 2 * K + spread(base + i, records_j) + value_row
        gl.store(new_u_at, u, mask=real & (i < count))
        for j in gl.static_range(i, TOKENS):
            outs = put(outs, j, outs[j] + u * _scalar(query_sees_s, i * TOKENS + j))
            if j > i:
                left = put(left, j, left[j] - u * _scalar(key_sees_s, i * TOKENS + j))
        out = narrow(gl.where(real, outs[i], 0.0), p_out.dtype.element_ty)
        gl.store(out_at + spread(head * 0 + i, o_t), out, mask=i < count)
