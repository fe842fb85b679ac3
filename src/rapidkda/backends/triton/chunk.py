"""Verification by replay, the tokens of a request as one small chunk: for drafts of more than one token.

With D_i the decay from the state to token i, all tokens read the state at once, and what a token sees of those before
it follows from sums over channels that need no state:

    u_i = b_i (v_i - S (D_i k_i) - sum_j<i a_ij u_j)      o_i = S (D_i q_i) + sum_j<=i c_ij u_j
    a_ij, c_ij: the sums over channels of k_i k_j and q_i k_j times the decay from j to i

So one product of the state by all keys and queries, and one by the matrix that solves for u and adds up o. Every decay
is a product of decays of single tokens: nothing overflows, and no difference of sums loses digits.

Tiles [WARPS, rows, K] give every warp some rows. Vectors over channels are tiles [WARPS, 1, K] with equal rows: a warp
computes its own copy of what all of them need, and waits for no other.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from . import launch
from .blocks import L2_EPS, exp, log_decay, narrow, trips, usable, with_held, within, without_product, write_strength

MOST = 8  # tokens of a chunk
HALF = tl.constexpr(MOST)  # a chunk's rows on the matrix units: its keys, then its queries


@triton.jit
def _all_channels(K: tl.constexpr, WARPS: tl.constexpr):
    return tl.broadcast_to(tl.arange(0, K)[None, None, :], [WARPS, 1, K])


@triton.jit
def _rows(first, COUNT: tl.constexpr, WARPS: tl.constexpr):
    """COUNT rows from `first`: [WARPS, COUNT / WARPS]."""
    return first + tl.arange(0, WARPS)[:, None] * (COUNT // WARPS) + tl.arange(0, COUNT // WARPS)[None, :]


@triton.jit
def _state_offsets(head, rows, channels, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Offsets of a tile inside a slot."""
    if V_FIRST:
        return head * (K * V) + rows[:, :, None] * K + channels
    return head * (K * V) + channels * V + rows[:, :, None]


@triton.jit
def _unit(x, L2NORM: tl.constexpr):
    x = x.to(tl.float32)
    if L2NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 2) + L2_EPS)[:, :, None]
    return x


@triton.jit
def fold(state, p_records, record_j, count, rows, channels, K: tl.constexpr, TOKENS: tl.constexpr):
    """Fold the first `count` records of a head into a state tile. Records past that are never read."""
    for start in range(0, trips(count), TOKENS):
        total = tl.zeros(channels.shape, tl.float32)
        for i in tl.static_range(TOKENS):
            p_record = p_records + (start + i) * record_j
            total += tl.load(p_record + K + channels, mask=start + i < count, other=0.0)
        state = state * exp(total)
        decay = tl.full(channels.shape, 1.0, tl.float32)  # from a token to the last one
        for i in tl.static_range(TOKENS - 1, -1, -1):
            p_record = p_records + (start + i) * record_j
            real = start + i < count
            k = tl.load(p_record + channels, mask=real, other=0.0)
            u = tl.load(p_record + 2 * K + rows, mask=real, other=0.0)
            state += u[:, :, None] * (k * decay)
            decay *= exp(tl.load(p_record + K + channels, mask=real, other=0.0))
    return state


@triton.jit
def put(items, at: tl.constexpr, item):
    """The tuple with one item replaced."""
    result = ()
    for i in tl.static_range(len(items)):
        if i == at:
            result += (item,)
        else:
            result += (items[i],)
    return result


@triton.jit(do_not_specialize=launch.STEP_SIZES, do_not_specialize_on_alignment=launch.TABLES)
def chunk_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, p_out, p_pool, p_records, p_first, p_length, p_slot,
    p_accepted, p_held,
    tokens, pool_rows, pad_slot, positions, group, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h, o_t, o_h,
    first_s, length_s, slots_s, accepted_s, pool_s, records_s, records_j,
    GATE: tl.constexpr, LOGITS: tl.constexpr, L2NORM: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, V_FIRST: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Fold the accepted records, store the state, run the drafts, record them. Grid (N HEADS): all value rows of a head
    read the same records, and the new ones overwrite them; heads of a request are neighbours in memory.

    With p_held, new records follow the old ones and the state is not stored, as long as there is room."""
    n = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    slot = tl.load(p_slot + n * slots_s).to(tl.int64)
    real = usable(slot, pool_rows, pad_slot)
    first, count = within(tl.load(p_first + n * first_s), tl.load(p_length + n * length_s), tokens)
    first, count = first.to(tl.int64), tl.minimum(count, positions)
    taken = tl.minimum(tl.maximum(tl.load(p_accepted + n * accepted_s).to(tl.int64), 0), positions).to(tl.int32)
    taken = tl.where(real & (count > 0), taken, 0)
    full, base = taken > 0, 0  # whether the state is stored, and the row of the first new record
    if p_held is not None:
        p_held += slot * HEADS + head
        taken = with_held(p_held, 0, taken, positions)
        full = full & (taken + count > positions)
        base = tl.where(full, 0, taken)
    channels = _all_channels(K, WARPS)
    warp = tl.arange(0, WARPS)[:, None]
    p_records += slot * records_s + head * (2 * K + V)
    p_q += (head // group) * q_h
    p_k += (head // group) * k_h
    bias = 0.0
    if p_dt_bias is not None:
        bias = tl.load(p_dt_bias + head * K + channels)

    for start in range(0, trips(count), TOKENS):  # once, but for requests of more than MOST tokens
        # What needs no state. `x` holds keys and queries; it ends up decayed from the state to each token.
        row = _rows(0, 2 * HALF, WARPS)
        at = row % HALF
        live = (at < TOKENS) & (start + at < count)
        token = (first + start + at)[:, :, None]
        x = tl.load(p_k + token * k_t + channels, mask=(live & (row < HALF))[:, :, None], other=0.0)
        x += tl.load(p_q + token * q_t + channels, mask=(live & (row >= HALF))[:, :, None], other=0.0)
        x = _unit(x, L2NORM) * tl.where(row < HALF, 1.0, scale)[:, :, None]
        weights = ()  # of the corrections, last first: what every row sees of them
        keys = ()
        decays = ()
        for _ in tl.static_range((TOKENS + WARPS - 1) // WARPS):
            keys += (tl.zeros([WARPS, 1, K], tl.float32),)
            decays += (tl.zeros([WARPS, 1, K], tl.float32),)
        for i in tl.static_range(TOKENS - 1, -1, -1):
            here = start + i < count
            k = _unit(tl.load(p_k + (first + start + i) * k_t + channels, mask=here, other=0.0), L2NORM)
            g = tl.load(p_g + (first + start + i) * g_t + head * g_h + channels, mask=here, other=0.0).to(tl.float32)
            g = log_decay(g, bias, p_a_log, lower_bound, head, GATE, 1.0)
            sees = (at > i) | ((at == i) & (row >= HALF))
            weights += (tl.reshape(tl.where(sees, tl.sum(x * k, 2), 0.0), [2 * HALF]),)
            x = x * tl.where((at >= i)[:, :, None], exp(g), 1.0)
            mine = (warp == i % WARPS)[:, :, None]  # the warp that will record this token
            keys = put(keys, i // WARPS, tl.where(mine, k, keys[i // WARPS]))
            decays = put(decays, i // WARPS, tl.where(mine, g, decays[i // WARPS]))
        x = tl.reshape(x, [2 * HALF, K])

        row = tl.arange(0, 2 * HALF)
        at = row % HALF
        is_key = row < HALF
        live = (at < TOKENS) & (start + at < count)
        token = (first + start + at)[:, None]
        b = tl.load(p_beta + (first + start + at) * b_t + head * b_h, mask=live, other=0.0).to(tl.float32)
        b = tl.where(is_key, write_strength(b, beta_scale, LOGITS), 1.0)
        mix = tl.where(row[:, None] == row[None, :], b[None, :], 0.0)  # transposed
        for i in tl.static_range(TOKENS):
            u = tl.sum(tl.where((row == i)[None, :], mix, 0.0), 1)
            mix -= u[:, None] * (weights[TOKENS - 1 - i] * b)[None, :]
        mix = tl.trans(mix)
        tl.debug_barrier()  # records of a chunk before are there to read
        for block in range(0, V // VB):
            last = block == V // VB - 1
            tile_rows = _rows(block * VB, VB, WARPS)
            p_state = p_pool + slot * pool_s + _state_offsets(head, tile_rows, channels, K, V, V_FIRST)
            state = tl.load(p_state, mask=real, other=0.0).to(tl.float32)
            folded = tl.where(start == 0, taken, base + start)
            state = fold(state, p_records, records_j, tl.where(real, folded, 0), tile_rows, channels, K, TOKENS)
            tl.store(p_state, narrow(state, p_pool.dtype.element_ty), mask=full & (start == 0))
            rows = block * VB + tl.arange(0, VB)
            v = tl.load(p_v + token * v_t + head * v_h + rows[None, :], mask=(live & is_key)[:, None], other=0.0)
            rest = without_product(v.to(tl.float32), x, tl.trans(tl.reshape(state, [VB, K])), PRECISION)
            rest = without_product(tl.zeros([2 * HALF, VB], tl.float32), mix, rest, PRECISION)
            tl.debug_barrier()  # every warp has read the old records before any of them is overwritten
            p_u = p_records + (base + start + at)[:, None] * records_j + 2 * K + rows[None, :]
            tl.store(p_u, -rest, mask=(live & is_key & real)[:, None])
            out = narrow(tl.where(real, rest, 0.0), p_out.dtype.element_ty)
            tl.store(p_out + token * o_t + head * o_h + rows[None, :], out, mask=(live & (row >= HALF))[:, None])
            for m in tl.static_range(len(keys)):
                j = (m * WARPS + warp)[:, :, None]
                keep = real & last & (j < TOKENS) & (start + j < count)
                tl.store(p_records + (base + start + j) * records_j + channels, keys[m], mask=keep)
                tl.store(p_records + (base + start + j) * records_j + K + channels, decays[m], mask=keep)
    if p_held is not None:
        tl.store(p_held, base, mask=real & (count > 0))


launcher = launch.Launcher(chunk_kernel)


def constants(positions: int, precision: str) -> tuple[int, str]:
    """What the kernel takes beyond what that of two tokens does: tokens of a chunk, precision of products."""
    return min(MOST, triton.next_power_of_2(positions)), precision
