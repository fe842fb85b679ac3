"""Verification by replay on compute capability 9.0, in Gluon: a request's tokens as one small chunk (see chunk.py).

A program owns one head of one request. S [V, K] is the state in memory and G [K] what its decays leave of it over all
records that count. K [R, K] are the keys of these, decayed to the last of them, and U [R, V] their corrections.
X [2 T, K] are the keys and queries of the tokens, each decayed from the last record to its token. The state after the
records and what the tokens read of it are

    S1 = S G + U' K                       stored where the records are full
    W = X S1' = (X G) S' + (X K') U

States in float32 take the first form of W. Those in bfloat16 are exact operands as they lie and take the second, and S1
is formed only to be stored. With M the inverse of the triangular system of the tokens and C what queries see of their
corrections, corrections and outputs are

    u = M (v - W of keys)
    o = W of queries + C u

All are products of the matrix units, of operands in two bfloat16 parts each, 16 bits of mantissa.

What programs compete for is the unit that all accesses to shared and global memory pass, one line of 128 bytes a cycle.
So the state comes in copies of whole lines, and the order of values in operands (rearrange.py) is such that a thread
moves 16 bytes of states, records, values and outputs at once. Copies are asked for in turn while everything that
needs no state is computed; all at once they would delay the tokens, which are needed first.

The programs that the device runs first ask L2 for what they will need, before it is this kernel's turn. Nothing of that
is used: whatever a table says by then, it is read again. Those that come next may ask, too: all at once, before they
read one thing after another.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from . import launch
from .ahead import ask_ahead
from .blocks import (
    L2_EPS,
    amplitude_of,
    applied,
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
from .rearrange import (
    above,
    as_values,
    at_columns,
    halves,
    in_memory,
    in_order,
    in_tiles,
    out_of_tiles,
    scalars,
    sides,
    stack,
    twice,
)

WARPS = gl.constexpr(4)
PIECE = gl.constexpr(32)  # channels of a state that are in registers at once
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _copy(copy_s, p_copy, real):
    """Ask for some channels of a state, as a group of copies of its own."""
    async_copy.async_copy_global_to_shared(copy_s, p_copy, mask=real)
    async_copy.commit_group()


@gluon.jit
def _corrections(p_u, records_j, taken, V: gl.constexpr, FOLD: gl.constexpr, LAYOUT: gl.constexpr):
    """Corrections [V, FOLD] of the records that count, at p_u."""
    j = gl.arange(0, FOLD, gl.SliceLayout(0, LAYOUT))
    row = gl.arange(0, V, gl.SliceLayout(1, LAYOUT))
    return gl.load(p_u + (spread(j, records_j)[None, :] + row[:, None]), mask=(j < taken)[None, :], other=0.0)


@gluon.jit
def _to_multiply(u, LEFT: gl.constexpr):
    """Both parts of corrections [V, FOLD] as operands; eight fill one twice."""
    high, low = high_low(in_tiles(u))
    if u.shape[1] == 8:
        high, low = twice(high), twice(low)
    return gl.convert_layout(high, LEFT), gl.convert_layout(low, LEFT)


@gluon.jit
def _stacked(k, q, GROUPS: gl.constexpr):
    """Keys over queries [2 T, K], the upper parts over the lower ones; of two tokens twice, to fill eight rows."""
    x = above(k, q)
    if x.shape[0] == 4:
        x = above(x, x)
    high, low = high_low(in_order(x, GROUPS))
    return above(high, low)


@gluon.jit
def _lane_sums(x):
    """Sums of the rows of x [T, 128] over what a lane has: [32 T]."""
    T: gl.constexpr = x.shape[0]
    return gl.reshape(gl.sum(gl.reshape(x, [T, 32, 4]), 2), [32 * T])


@gluon.jit
def _shared_out(x, y, APART: gl.constexpr):
    """Sums over pairs of lanes: those of x in the lower lane of each, those of y in the upper one. Both are of one
    element a thread, whose place is its lane, then its warp."""
    upper = (gl.arange(0, x.shape[0], x.type.layout) & APART) != 0
    taken = gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=f,f,r", [gl.where(upper, x, y), gl.to_tensor(APART)],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip
    return gl.where(upper, y, x) + taken


@gluon.jit
def _halved(items, APART: gl.constexpr):
    """`_shared_out` of the first half of the items with the second one."""
    result = ()
    for i in gl.static_range(len(items) // 2):
        result += (_shared_out(items[i], items[len(items) // 2 + i], APART),)
    return result


@gluon.jit
def _before(k, q, keys_s, decays_s):
    """What keys and queries [T, K] see of the keys up to them [T, 2 T], every decay a product of those of single
    tokens, and both, decayed from the state to their tokens. A warp has a token, of eight one in each half."""
    T: gl.constexpr = k.shape[0]
    LAYOUT: gl.constexpr = k.type.layout
    if T == 8:
        k_low, k = halves(k)
        q_low, q = halves(q)
        k_low, k = gl.convert_layout(k_low, LAYOUT), gl.convert_layout(k, LAYOUT)
        q_low, q = gl.convert_layout(q_low, LAYOUT), gl.convert_layout(q, LAYOUT)
    token = gl.arange(0, min(T, 4), gl.SliceLayout(1, LAYOUT))
    of_keys = ()
    of_queries = ()
    for i in gl.static_range(T - 1, -1, -1):
        seen = keys_s.slice(i, 1).load(LAYOUT)
        decay = decays_s.slice(i, 1).load(LAYOUT)
        of_key, of_query = _lane_sums(k * seen), _lane_sums(q * seen)
        if T < 8:
            factor = gl.where((token >= i)[:, None], decay, 1.0)
        elif i > 4:
            factor = gl.where((token >= i - 4)[:, None], decay, 1.0)
        else:
            factor = decay
        k *= factor
        q *= factor
        if T == 8:
            key_low, query_low = gl.zeros_like(of_key), gl.zeros_like(of_query)
            if i < 4:
                key_low, query_low = _lane_sums(k_low * seen), _lane_sums(q_low * seen)
                factor = gl.where((token >= i)[:, None], decay, 1.0)
                k_low *= factor
                q_low *= factor
            of_key, of_query = _shared_out(key_low, of_key, 16), _shared_out(query_low, of_query, 16)
        of_keys = (of_key,) + of_keys
        of_queries = (of_query,) + of_queries
    sums = of_keys + of_queries
    if T == 8:  # a lane has one sum in the end
        sums = _halved(_halved(_halved(_halved(sums, 8), 4), 2), 1)
        sees = gl.reshape(gl.permute(gl.reshape(sums[0], [4, 2, 16]), (1, 0, 2)), [8, 16])
        k, q = gl.convert_layout(above(k_low, k), LAYOUT), gl.convert_layout(above(q_low, q), LAYOUT)
    elif T == 4:
        sees = gl.sum(gl.reshape(_halved(_halved(_halved(sums, 16), 8), 4)[0], [4, 8, 4]), 2)
    else:
        sees = gl.sum(gl.reshape(_halved(_halved(sums, 16), 8)[0], [2, 4, 8]), 2)
    return sees, k, q


@gluon.jit
def _mix(strength_s, sees_s, high_s, low_s, TOKENS: gl.constexpr):
    """M over C M [2 T, T], transposed into [16, 16], twice on top of itself: for both parts of what they apply to. In
    two parts too, of which the lower one applies to upper parts alone."""
    UNIT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    unit = gl.arange(0, 16, UNIT)
    strengths = scalars(strength_s, TOKENS)
    inverse = ()
    outer = ()
    for t in gl.static_range(TOKENS):
        sees = scalars(sees_s.slice(t, 1), 2 * TOKENS)
        solved = gl.where(unit % 8 == t, 1.0, 0.0)
        for i in gl.static_range(t):
            solved -= inverse[i] * sees[i]
        inverse += (solved * strengths[t],)
        seen = inverse[0] * sees[TOKENS]
        for i in gl.static_range(1, t + 1):
            seen += inverse[i] * sees[TOKENS + i]
        outer += (seen,)
    mix = inverse + outer
    for _ in gl.static_range(16 - 2 * TOKENS):
        mix += (gl.zeros([16], gl.float32, UNIT),)
    high, low = high_low(stack(mix))
    high_s.store(high)
    low_s.store(gl.where((gl.arange(0, 16, gl.SliceLayout(1, low.type.layout)) < 8)[:, None], low, 0.0))


@gluon.jit
def _piece(copy_s, piece: gl.constexpr, LAYOUT: gl.constexpr):
    """A piece of a state [V, PIECE] out of a copy, which holds one or two. What is not used is not loaded."""
    copy = copy_s.load(LAYOUT)
    if copy.shape[1] > PIECE:
        copy = sides(copy)[piece % 2]
    return copy


@gluon.jit
def _folded(
    raw, u_high, u_low, old_s, late_s, piece: gl.constexpr, FOLD: gl.constexpr, DEPTH: gl.constexpr,
    STORE: gl.constexpr,
):  # fmt: skip
    """A piece of the state after the records: its channels in order, its rows as they come."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, STORE, 2)
    state = widened(gl.convert_layout(in_tiles(raw), STORE))
    state *= late_s.slice(piece * PIECE, PIECE).load(gl.SliceLayout(0, STORE))[None, :]
    keys = old_s.slice(0, DEPTH).slice(piece * PIECE, PIECE, 1).load(RIGHT)
    state = mma_v2(u_high, keys, state)
    state = mma_v2(u_low, keys, state)
    if FOLD > 8:
        state = mma_v2(u_high, old_s.slice(FOLD, FOLD).slice(piece * PIECE, PIECE, 1).load(RIGHT), state)
    return out_of_tiles(state)


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
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Apply the records that count, store the state where the new ones do not fit, run the tokens, record them.

    Grid (N * HEADS), WARPS warps. TOKENS (2, 4, 8) bounds the tokens of a request, FOLD (8, 16, 32) the records of a
    slot. AHEAD: how many programs ask L2 ahead.
    """
    gl.static_assert((K == 128) & (V == 128), "layouts are of heads of 128")
    LAZY: gl.constexpr = p_pool.dtype.element_ty == gl.bfloat16  # the state is read as it lies
    GROUPS: gl.constexpr = 2 if LAZY else 1  # of four neighbours in memory that a thread has
    WIDTH: gl.constexpr = 64 if LAZY else 32  # channels of a copy, a line of each value
    COPIES: gl.constexpr = K // WIDTH
    # Places for copies in shared memory. Two of float32 states leave room for more programs, but the copies that follow
    # wait until every warp has read the first ones. How many programs that makes: _bind_replay_sm90 in recurrent.py
    PLACES: gl.constexpr = 2 if p_held is not None and (TOKENS == 8 or FOLD > 8) else COPIES
    AT_FIRST: gl.constexpr = 1 if LAZY else 2  # copies that are asked for right behind the loads of all else
    STACKED: gl.constexpr = TOKENS < 8  # both parts of X are rows of one operand
    X_ROWS: gl.constexpr = 16 if STACKED else 32  # of both parts
    QUERY: gl.constexpr = TOKENS if STACKED else 0  # the first row of outputs in eight
    DEPTH: gl.constexpr = 16 if FOLD == 8 else FOLD  # records in a product; of 8, it takes both parts
    READ: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])  # tokens x values
    A: gl.constexpr = gl.DotOperandLayout(0, READ, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, READ, 2)
    STORE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])  # values x channels
    LEFT: gl.constexpr = gl.DotOperandLayout(0, STORE, 2)
    SEEN: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [X_ROWS // 16, 16 * WARPS // X_ROWS], [16, 8])  # X x records
    EIGHT: gl.constexpr = gl.DistributedLinearLayout(  # eight rows of READ, values in order
        [[0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[0, 32], [0, 64]], [], [8, V]
    )
    EIGHT_COLUMNS: gl.constexpr = gl.DistributedLinearLayout(  # the same as `at_columns` has them
        [[0, 1], [0, 32], [0, 64]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[0, 8], [0, 16]], [], [8, V]
    )
    # Eight records take half of an operand, which holds both of their parts
    HALF_A: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[0, 0], [0, 0]], [], [16, 8]
    )
    # Corrections as they are read, values in order: what a thread needs of B and of LEFT
    U_RIGHT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0]][: 3 + FOLD // 16],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [0, 64]],
        [],
        [FOLD, V],
    )
    U_LEFT: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 1], [0, 8], [0, 16]][: 3 + FOLD // 16],
        [[0, 2], [0, 4], [4, 0], [8, 0], [16, 0]],
        [[32, 0], [64, 0]],
        [],
        [V, FOLD],
    )
    OLD_A: gl.constexpr = HALF_A if FOLD == 8 else A
    COPY: gl.constexpr = gl.BlockedLayout([1, 8 if LAZY else 4], [4, 8], [WARPS, 1], [1, 0])
    # What a thread needs of B: of a piece of the state, and of a copy, which is one piece or two
    NEAR: gl.constexpr = [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]] if LAZY else [[0, 1], [0, 2], [1, 0], [2, 0], [0, 16]]
    QUAD: gl.constexpr = [[0, 8], [0, 16]] if LAZY else [[0, 4], [0, 8]]
    OWN: gl.constexpr = gl.DistributedLinearLayout(
        NEAR, QUAD + [[4, 0], [8, 0], [16, 0]], [[32, 0], [64, 0]], [], [V, PIECE]
    )
    OWN_COPY: gl.constexpr = gl.DistributedLinearLayout(
        NEAR + ([[0, 32]] if LAZY else []), QUAD + [[4, 0], [8, 0], [16, 0]], [[32, 0], [64, 0]], [], [V, WIDTH]
    )
    ROWS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])  # a row a warp
    EACH: gl.constexpr = FOLD // WARPS  # records of a warp
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)  # rows of bfloat16 for operands
    SMALL: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    copies_s = ()
    for _ in gl.static_range(PLACES):
        copies_s += (
            gl.allocate_shared_memory(
                p_pool.dtype.element_ty, [V, WIDTH], gl.SwizzledSharedLayout(WIDTH // 2, 4, 2, [1, 0])
            ),
        )
    # Places in a state: what a thread's have in common, then what they are apart, in which the compiler sees constants
    line = gl.arange(0, V, gl.SliceLayout(1, COPY))
    copied = ((line & 15) * K)[:, None] + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))[None, :]
    copied_apart = ((line & 112) * K)[:, None]
    line = gl.arange(0, V, gl.SliceLayout(1, OWN))
    own = ((line & 124) * K)[:, None] + gl.arange(0, PIECE, gl.SliceLayout(0, OWN))[None, :]
    own_apart = ((line & 3) * K)[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, ROWS))
    channel = gl.arange(0, K, gl.SliceLayout(0, ROWS))
    row = gl.arange(0, 8, gl.SliceLayout(1, EIGHT))
    value = gl.arange(0, V, gl.SliceLayout(0, EIGHT))
    upper = gl.arange(0, 16, gl.SliceLayout(1, READ)) < 8

    n = gl.program_id(0) // HEADS
    head = gl.program_id(0) % HEADS
    p_k += spread(head // GROUP, k_h)
    p_q += spread(head // GROUP, q_h)
    p_v += spread(head, v_h)
    p_g += spread(head, g_h)
    if gl.program_id(0) < AHEAD:
        ask_ahead(
            p_q, p_k, p_v, p_g, p_records + head * (2 * K + V), p_first, p_length, p_slot, p_accepted, p_held,
            n, head, tokens, pool_rows, pad_slot, positions, q_t, k_t, v_t, g_t,
            first_s, length_s, slots_s, accepted_s, records_s, records_j, K, V, HEADS, TOKENS, FOLD,
        )  # fmt: skip
    take_turn()
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
    k_at = p_k + spread(first, k_t) + spread(token, k_t)[:, None] + channel[None, :]
    g_at = p_g + spread(first, g_t) + spread(token, g_t)[:, None] + channel[None, :]
    q_at = p_q + spread(first, q_t) + spread(token, q_t)[:, None] + channel[None, :]
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
    v_at = p_v + spread(first, v_t) + (spread(row, v_t)[:, None] + value[None, :])
    v = gl.load(v_at, mask=(row < count)[:, None], other=0.0)
    # How many records count, whether the state is stored, and where the new ones go
    taken = gl.where(accepted > 0, applied(accepted, held, positions), 0)
    if p_held is None:
        full = taken > 0
        base = 0 * taken
    else:
        full = real & (taken + count > positions)
        base = gl.where(full, 0, taken)
    p_record = p_records + (spread(slot, records_s) + head * (2 * K + V))
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, ROWS))
    old_at = p_record + channel[None, :]
    old_keys = ()
    old_decays = ()
    for i in gl.static_range(EACH):
        own_j = warp * EACH + i
        j_at = old_at + spread(own_j, records_j)[:, None]
        old_keys += (gl.load(j_at, mask=(own_j < taken)[:, None], other=0.0),)
        old_decays += (gl.load(j_at + K, mask=(own_j < taken)[:, None], other=0.0),)
    # Their corrections, as the operand that is needed in any case
    if LAZY:
        j = gl.arange(0, FOLD, gl.SliceLayout(1, U_RIGHT))
        u_at = p_record + 2 * K + spread(j, records_j)[:, None] + gl.arange(0, V, gl.SliceLayout(0, U_RIGHT))[None, :]
        old_u = gl.load(u_at, mask=(j < taken)[:, None], other=0.0)
    else:
        old_u = _corrections(p_record + 2 * K, records_j, taken, V, FOLD, U_LEFT)
    # The compiler would move copies before loads, which would wait for them in line, and what uses the loads before the
    # copies. The barrier stops the one, the branch on `some` the other.
    gl.thread_barrier()
    for i in gl.static_range(AT_FIRST):
        _copy(copies_s[i], p_state + copied + (i * WIDTH + copied_apart), real)
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
    # Keys of the records, decayed to the last one of their warp
    total = exp(old_decays[EACH - 1])
    late_keys = (old_keys[EACH - 1],)
    for i in gl.static_range(EACH - 2, -1, -1):
        late_keys = (old_keys[i] * total,) + late_keys
        total *= exp(old_decays[i])
    totals_s = gl.allocate_shared_memory(gl.float32, [WARPS, K], PLAIN)
    totals_s.store(total)
    gl.thread_barrier()  # every warp has read `held`, old keys and decays before any of them is overwritten
    new_at = p_record + spread(base + token, records_j)[:, None] + channel[None, :]
    gl.store(new_at, k, mask=(live & real)[:, None])
    gl.store(new_at + K, g, mask=(live & real)[:, None])
    if p_held is not None:
        gl.store(p_held + (spread(slot, HEADS) + head), base, mask=real)
    for i in gl.static_range(AT_FIRST, PLACES):  # between barriers for the compiler's sake, as above
        _copy(copies_s[i], p_state + copied + (i * WIDTH + copied_apart), real)
    gl.thread_barrier()

    # What tokens see of those before them; their keys and queries, decayed from the state to each
    sees, k, q = _before(k, q, keys_s, decays_s)
    sees_s = gl.allocate_shared_memory(gl.float32, [TOKENS, 2 * TOKENS], PLAIN)
    sees_s.store(sees)

    # K as an operand, both parts of it, and how much of the state is left
    to_end = gl.full([WARPS, K], 1.0, gl.float32, ROWS)
    late = totals_s.slice(0, 1).load(ROWS)
    for i in gl.static_range(1, WARPS):
        warp_total = totals_s.slice(i, 1).load(ROWS)
        late *= warp_total
        to_end *= gl.where((warp < i)[:, None], warp_total, 1.0)
    if LAZY:
        before_s = gl.allocate_shared_memory(gl.float32, [1, K], PLAIN)
        before_s.store(late)
    last_keys = ()
    for i in gl.static_range(EACH):
        last_keys += (gl.reshape(late_keys[i] * to_end, [WARPS * K]),)
    last = gl.reshape(gl.permute(gl.reshape(stack(last_keys), [WARPS, K, EACH]), (0, 2, 1)), [FOLD, K])
    high, low = high_low(in_order(last, GROUPS))
    old_s = gl.allocate_shared_memory(gl.bfloat16, [2 * FOLD, K], WIDE)
    old_s.slice(0, FOLD).store(high)
    old_s.slice(FOLD, FOLD).store(low)
    late_s = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    late_s.store(gl.reshape(in_order(late, GROUPS), [K]))
    # X as an operand, both parts of it
    x_s = gl.allocate_shared_memory(gl.bfloat16, [X_ROWS, K], WIDE)
    x_s.store(_stacked(k, q, GROUPS))

    if LAZY:  # X K', then X is decayed from before the records
        seen = mma_v2(
            x_s.load(gl.DotOperandLayout(0, SEEN, 2)),
            old_s.permute((1, 0)).load(gl.DotOperandLayout(1, SEEN, 2)),
            gl.zeros([X_ROWS, 2 * FOLD], gl.float32, SEEN),
        )
        seen_s = gl.allocate_shared_memory(
            gl.float32,
            [X_ROWS, 2 * FOLD],
            gl.SwizzledSharedLayout(8, 2 if FOLD == 8 else 1, 2 if FOLD == 8 else 4, [1, 0]),
        )
        if STACKED:
            top, bottom = halves(seen)
            seen = above(top + bottom, top + bottom)
        seen_s.store(seen)
        late_rows = before_s.load(ROWS)
        x_s.store(_stacked(k * late_rows, q * late_rows, GROUPS))

    u_high = gl.zeros([V, DEPTH], gl.bfloat16, LEFT)  # the other operand that the corrections are, where it is needed
    u_low = u_high
    if not LAZY:
        u_high, u_low = _to_multiply(old_u, LEFT)
    elif full:
        u_high, u_low = _to_multiply(_corrections(p_record + 2 * K, records_j, taken, V, FOLD, U_LEFT), LEFT)

    mix_high_s = gl.allocate_shared_memory(gl.bfloat16, [16, 16], SMALL)
    mix_low_s = gl.allocate_shared_memory(gl.bfloat16, [16, 16], SMALL)
    _mix(strength_s, sees_s, mix_high_s, mix_low_s, TOKENS)

    sums = gl.zeros([16, V], gl.float32, READ)
    rest = sums  # of them, products of lower parts: neither waits for the other
    if LAZY:  # what tokens read of the records
        seen = seen_s.slice(0, 16).slice(0, FOLD, 1).load(OLD_A) + seen_s.slice(0, 16).slice(FOLD, FOLD, 1).load(OLD_A)
        if not STACKED:
            seen += seen_s.slice(16, 16).slice(0, FOLD, 1).load(OLD_A)
        high, low = high_low(seen)
        old_high, old_low = high_low(at_columns(old_u))
        if STACKED:
            high = gl.where((gl.arange(0, 16, gl.SliceLayout(1, OLD_A)) < 8)[:, None], high, low)
        if FOLD == 8:
            both = gl.convert_layout(above(old_high, old_low), B)
            sums = mma_v2(gl.convert_layout(twice(high), A), both, sums)
            if not STACKED:
                rest = mma_v2(gl.convert_layout(twice(low), A), both, rest)
        else:
            old_high, old_low = gl.convert_layout(old_high, B), gl.convert_layout(old_low, B)
            sums = mma_v2(high, old_high, sums)
            rest = mma_v2(high, old_low, rest)
            if not STACKED:
                rest = mma_v2(low, old_high, rest)
    for piece in gl.static_range(K // PIECE):
        if piece * PIECE % WIDTH == 0:
            async_copy.wait_group(min(COPIES - 1 - piece * PIECE // WIDTH, PLACES - 1))
        raw = in_order(_piece(copies_s[piece * PIECE // WIDTH % PLACES], piece, OWN_COPY), GROUPS)
        if piece * PIECE + PLACES * WIDTH < K:  # every warp has what another copy replaces
            gl.thread_barrier()
            at = p_state + copied + (piece * PIECE + PLACES * WIDTH + copied_apart)
            _copy(copies_s[piece * PIECE // WIDTH % PLACES], at, real)
        x_high = x_s.slice(0, 16).slice(piece * PIECE, PIECE, 1).load(A)
        if LAZY:
            if full:
                folded = _folded(raw, u_high, u_low, old_s, late_s, piece, FOLD, DEPTH, STORE)
                folded = in_memory(narrow(folded, p_pool.dtype.element_ty), GROUPS)
                gl.store(p_state + own + (piece * PIECE + own_apart), gl.convert_layout(folded, OWN))
            state_high = gl.convert_layout(at_columns(gl.permute(raw, (1, 0))), B)
        else:
            state = _folded(raw, u_high, u_low, old_s, late_s, piece, FOLD, DEPTH, STORE)
            stored = gl.convert_layout(in_memory(state, GROUPS), OWN)
            gl.store(p_state + own + (piece * PIECE + own_apart), stored, mask=full)
            state_high, state_low = high_low(at_columns(gl.permute(state, (1, 0))))
            state_high, state_low = gl.convert_layout(state_high, B), gl.convert_layout(state_low, B)
            rest = mma_v2(x_high, state_low, rest)
        sums = mma_v2(x_high, state_high, sums)
        if not STACKED:
            x_low = x_s.slice(16, 16).slice(piece * PIECE, PIECE, 1).load(A)
            rest = mma_v2(x_low, state_high, rest)

    read = sums + rest
    top, bottom = halves(read)
    v = gl.convert_layout(at_columns(v.to(gl.float32)), EIGHT_COLUMNS)
    if STACKED:
        top = gl.convert_layout(top + bottom, EIGHT_COLUMNS)
        nothing = gl.zeros([8, V], gl.float32, EIGHT_COLUMNS)
        keys = (gl.arange(0, 8, gl.SliceLayout(1, EIGHT_COLUMNS)) < TOKENS)[:, None]
        left = gl.where(keys, v - top, 0.0)
        start = gl.convert_layout(above(gl.where(keys, 0.0, top), nothing), READ)
    else:
        left = v - gl.convert_layout(top, EIGHT_COLUMNS)
        start = gl.where(upper[:, None], 0.0, read)
    high, low = high_low(left)
    left_s = gl.allocate_shared_memory(gl.bfloat16, [16, V], WIDE)
    left_s.store(above(high, low))
    gl.thread_barrier()  # every warp has read the old corrections before any of them is overwritten
    both = left_s.load(B)
    mixed = mma_v2(mix_high_s.permute((1, 0)).load(A), both, start)
    mixed = mma_v2(mix_low_s.permute((1, 0)).load(A), both, mixed)
    top, bottom = halves(mixed)
    u = gl.convert_layout(as_values(top), EIGHT)
    o = u if STACKED else gl.convert_layout(as_values(bottom), EIGHT)
    new_u_at = p_record + 2 * K + (spread(base + row, records_j)[:, None] + value[None, :])
    gl.store(new_u_at, u, mask=(real & (row < count))[:, None])
    out_at = p_out + (spread(first, o_t) + spread(head, o_h))
    out_at += spread(gl.maximum(row - QUERY, 0), o_t)[:, None] + value[None, :]
    out = narrow(gl.where(real, o, 0.0), p_out.dtype.element_ty)
    gl.store(out_at, out, mask=((row >= QUERY) & (row < QUERY + count))[:, None])
