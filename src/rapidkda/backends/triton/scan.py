"""Second half of a prefill: the states, tile after tile, and the outputs.

A program owns VB value rows of one head of one segment (or part of a segment) and keeps their state S [VB, K] in
float32 registers, V as the rows of every product:

    R = v - n (S kd)        U = R T        O = q_scale (S qd + R P)        S <- decay S + U kr

In half precision, R, T, P and U enter as two bfloat16 parts each: entries cancel where keys are nearly equal, and the
rounding of U adds up in the state. kr is read as kd plus the rest: what is left to round is as small as the decay
within a tile, so that where nothing decays nothing adds up over thousands of tiles. Operands that share a factor lie
side by side in one product (kd and qd; P and T; both parts), so that the chain has few products to wait for.

Four passes share the code. WHOLE: segments from their initial states. FIRST and SECOND run a segment as parts side by
side. FIRST takes first parts, whose start is known, to their end, and of every other part but the last its own
contribution (rows of V, from a zero state) and its effect on the state it starts from (rows of K, from the identity,
without values). Once those are linked (`compose`), SECOND takes all parts but the first from their true states.

SHARED runs segments whole where there are some more chains (a head of a segment) than the GPU runs side by side, and
shares their tiles out evenly. The chains lie one after another on a line, and each program takes as much of it as every
other, or as the longest chain. It runs from the end of its share to the start: first the head of a chain that the next
share begins with, whose state it hands over, then whole chains, last what follows the head that the share before it
handed over. The program of that one ran the head first of all, and started no later: hardly any program waits, and none
for one that has not started.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import target_info

from . import launch
from .blocks import INTERPRETED, add_dot, dot, dot_fp32, high_low, narrow, trips, usable, within
from .tiles import part_start, tile_count, weight

WHOLE = tl.constexpr(0)
FIRST = tl.constexpr(1)
SECOND = tl.constexpr(2)
SHARED = tl.constexpr(3)


@triton.jit
def _side_by_side(a, b, R: tl.constexpr, C: tl.constexpr):
    """[a | b] of two [R, C] operands of a product, in registers."""
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [R, 2 * C])


@triton.jit
def _halves(x, R: tl.constexpr, C: tl.constexpr):
    """The two [R, C] halves of x [R, 2 C], in registers."""
    return tl.split(tl.permute(tl.reshape(x, [R, 2, C]), [0, 2, 1]))


@triton.jit
def advance(
    state, p_bf16, p_fp32, p_v, p_out, records, begin, end, length, has_values, real, heads, v_t, o_t, block,
    K: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, RECORD: tl.constexpr,
    OUTPUTS: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Run tiles begin .. end - 1 of a segment; `records` is its first record, p_v and p_out its first token's rows."""
    PAIRS: tl.constexpr = 3 * C * K
    VECTORS: tl.constexpr = PAIRS + (2 if PRECISE else 4) * C * C
    FROM_STATE: tl.constexpr = 2 * C if OUTPUTS else C
    rows = block * VB + tl.arange(0, VB)
    lanes = tl.arange(0, C)
    twice = tl.arange(0, 2 * C)
    parts = tl.arange(0, 4 * C)
    channels = tl.arange(0, K)
    from_state_offset = (2 * C - FROM_STATE + tl.arange(0, FROM_STATE))[None, :] * K + channels[:, None]
    into_state_offset = (2 * C + lanes if PRECISE else C + twice)[:, None] * K + channels[None, :]
    # P above T, transposed, without P where there are no outputs
    pair_rows = (2 * C - FROM_STATE + tl.arange(0, FROM_STATE))[None, :] * C
    pair_offset = PAIRS + pair_rows + lanes[:, None]
    # The same of both parts, each twice: [high, high, low, low], for an operand [high, low, high, low]
    parts_offset = PAIRS + pair_rows + (parts % C + parts // (2 * C) * (2 * C * C))[:, None]
    step = (records * 0 + heads) * RECORD  # 64-bit
    square = tl.arange(0, VB)
    identity = tl.where(square[:, None] == square[None, :], 1.0, 0.0)
    for i in tl.range(trips(begin), trips(end), num_stages=STAGES):
        record = records + i * step
        if PRECISE:
            p_record = p_fp32 + record * 64
            p_vectors = p_record + VECTORS
        else:
            p_record = p_bf16 + record * 128
            p_vectors = p_fp32 + record * 64 + VECTORS // 2
        token = i * C + lanes
        valid = (token < length)[None, :]
        v = tl.load(p_v + token.to(tl.int64)[None, :] * v_t + rows[:, None], mask=valid & has_values, other=0.0)
        from_state = tl.load(p_record + from_state_offset)
        if PRECISE:
            known = dot_fp32(state, from_state, PRECISION)
        else:
            v = dot(identity.to(v.dtype), v)  # only operands of products are fetched well ahead
            known = dot(narrow(state, tl.bfloat16), from_state)
        state = state * tl.load(p_vectors + channels)[None, :]
        if OUTPUTS:
            out, known = _halves(known, VB, C)
        u = v - known * tl.load(p_vectors + K + lanes)[None, :]
        if PRECISE:
            u = dot_fp32(u, tl.load(p_record + pair_offset), PRECISION)
        else:
            high, low = high_low(u)
            u = _side_by_side(high, low, VB, C)
            u = dot(_side_by_side(u, u, VB, 2 * C), tl.load(p_record + parts_offset))
        if OUTPUTS:
            inner, u = _halves(u, VB, C)
            out = tl.where(real, (out + inner) * tl.load(p_vectors + K + C + lanes)[None, :], 0.0)
            tl.store(
                p_out + token.to(tl.int64)[None, :] * o_t + rows[:, None],
                narrow(out, p_out.dtype.element_ty),
                mask=valid,
            )
        into_state = tl.load(p_record + into_state_offset)
        if PRECISE:
            state += dot_fp32(u, into_state, PRECISION)
        else:
            high, low = high_low(u)
            state = add_dot(state, _side_by_side(low, low, VB, C), into_state)
            state = add_dot(state, _side_by_side(high, high, VB, C), into_state)
    return state


@triton.jit
def placed(state, K: tl.constexpr):
    """The state as `advance` takes it; a layout, where the language has them."""
    return state


@triton.jit
def _slot_offsets(slot, slot_s, head, rows, channels, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    base = slot * slot_s + head * (K * V)
    if V_FIRST:
        return base + rows[:, None] * K + channels[None, :]
    return base + channels[None, :] * V + rows[:, None]


@triton.jit
def _anew(x):
    """x, which the compiler takes for another number each time: what depends on it is not kept in registers from one
    turn of a loop to the next."""
    if not INTERPRETED:
        if target_info.is_cuda():
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x


@triton.jit
def _chain(p_line, p_order, at, segments, heads):
    """The chain at a point of the line: segment, head, and where the chain starts."""
    rank = at * 0
    above = rank + segments
    while rank + 1 < above:
        middle = (rank + above) // 2
        reached = tl.load(p_line + middle) * heads <= at
        rank = tl.where(reached, middle, rank)
        above = tl.where(reached, above, middle)
    start = tl.load(p_line + rank)
    length = tl.load(p_line + rank + 1) - start
    head = (at - start * heads) // length
    return tl.load(p_order + rank), head.to(tl.int64), start * heads + head * length


@triton.jit
def _hand_over(p_state, state, p_flag):
    """Leave a state for another program."""
    tl.store(p_state, state)
    tl.debug_barrier()  # all threads have stored
    tl.atomic_xchg(p_flag, 1, sem="release")


@triton.jit
def _wait_for(p_flag):
    """Wait until the state of this flag is there."""
    while tl.atomic_add(p_flag, 0, sem="acquire") == 0:
        pass


@triton.jit(
    do_not_specialize=[
        "tokens", "segments", "record_start", "carry_start", "transition_start", "heads", "early", "first_eighths",
        "initial_rows", "final_rows", "checkpoint_rows", "pad_slot",
    ],
    do_not_specialize_on_alignment=launch.TABLES,
)  # fmt: skip
def scan_kernel(
    p_table, p_bf16, p_fp32, p_v, p_out, p_initial, p_final, p_checkpoint,
    p_first, p_length, p_read, p_write, p_has, p_begin, p_offset, p_slot,
    tokens, segments, record_start, carry_start, transition_start, heads, early, first_eighths,
    initial_rows, final_rows, checkpoint_rows, pad_slot,
    v_t, v_h, o_t, o_h, first_s, length_s, initial_s, final_s, read_s, write_s, has_s, begin_s, offset_s, slot_s,
    checkpoint_s,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, VB: tl.constexpr, RECORD: tl.constexpr,
    V_FIRST: tl.constexpr, PASS: tl.constexpr, PRECISE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks, HV, segments or later parts); (row blocks, shares, 1) in SHARED; in FIRST a line: so many
    `early` programs of middle parts (row blocks of V and of K, then HV, then parts), those of first parts, the other
    ones of middle parts.

    RECORD and the *_start are in units of 256 bytes.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    place = tl.program_id(2)
    share = head
    middle = place < 0  # yields B or M
    if PASS == FIRST:
        starting = segments * heads * (V // VB)
        middle = (block < early) | (block >= early + starting)
        task = tl.where(block < early, block, tl.where(middle, block - starting, block - early))
        blocks = tl.where(middle, (V + K) // VB, V // VB)
        block = task % blocks
        head = task // blocks % heads
        place = task // blocks // heads
    head = head.to(tl.int64)
    has_values = block * VB < V
    p_line = p_table + 2 * (segments + 1)
    p_order = p_line + segments + 1
    p_flags = p_order + segments
    index = place * 0
    part = index
    parts = index + 1
    named = index
    if PASS == WHOLE:
        named = tl.load(p_order + place)
    elif PASS != SHARED:
        later = middle | (PASS == SECOND)
        named = tl.load(p_order + tl.where(later, segments + 2 * place, place))
        if named < 0:
            return
        part = tl.load(p_table + segments + 1 + named)
        parts = tl.load(p_table + segments + 2 + named) - part
        index = tl.load(p_order + segments + 2 * place + 1, mask=later, other=0)
        if middle & (index == parts - 1):
            return
        part += index
    p_carry = p_fp32 + carry_start.to(tl.int64) * 64

    # What is left of a share, low .. high - 1 on the line; the other passes take one turn, for the chain of a program
    low = index
    high = low + 1
    if PASS == SHARED:
        line = tl.load(p_line + segments) * heads
        shares = tl.num_programs(1)
        size = tl.maximum((line + shares - 1) // shares, tl.load(p_line + 1))
        low = share * size
        high = tl.minimum(low + size, line)
    while high > low:
        start = low
        mine = block
        if PASS == SHARED:
            mine = _anew(block)
            named, head, start = _chain(p_line, p_order, high - 1, segments, heads)
        channels = tl.arange(0, K)
        rows = mine * VB + tl.arange(0, VB)
        carry_offset = rows[:, None] * K + channels[None, :]
        n = named.to(tl.int64)
        first, given = tl.load(p_first + n * first_s), tl.load(p_length + n * length_s)
        first, length = within(first, given, tokens)
        first = first.to(tl.int64)
        count = tile_count(length, C)
        begin = part_start(count, index, parts, first_eighths)
        end = part_start(count, index + 1, parts, first_eighths)
        taken = low > start  # does the share before leave the state to this one,
        handed = taken  # or this one to the next?
        if PASS == SHARED:
            begin = tl.minimum(tl.maximum(low - start, 0), count)
            end = tl.minimum(high - start, count)
            handed = high - start < weight(count)
            left_by = share - taken.to(tl.int32)
            p_left = p_carry + left_by.to(tl.int64) * (V * K) + carry_offset
            p_flag = p_flags + left_by * (V // VB) + block

        real = given >= 0
        fresh = given < 0
        read_slot = n
        write_slot = n
        if p_initial is not None:
            if p_read is not None:
                read_slot = tl.load(p_read + n * read_s).to(tl.int64)
                real = real & usable(read_slot, initial_rows, pad_slot)
            if p_has is not None:
                fresh = tl.load(p_has + n * has_s) == 0
        if p_final is not None:
            if p_write is not None:
                write_slot = tl.load(p_write + n * write_s).to(tl.int64)
                real = real & usable(write_slot, final_rows, pad_slot)

        state = tl.zeros([VB, K], tl.float32)
        if PASS == SECOND:
            before = (part - 1).to(tl.int64) * heads + head
            state = tl.load(p_carry + before * (V * K) + carry_offset)
        elif p_initial is not None:
            state = tl.load(
                p_initial + _slot_offsets(read_slot, initial_s, head, rows, channels, K, V, V_FIRST),
                mask=real & (fresh == 0) & (middle == 0),
                other=0.0,
            ).to(tl.float32)
        if PASS == SHARED:
            if taken:
                _wait_for(p_flag)
                state = tl.load(p_left)
        if PASS == FIRST:
            state += tl.where((rows - V)[:, None] == channels[None, :], 1.0, 0.0)
        state = placed(state, K)

        records = record_start + (tl.load(p_table + n).to(tl.int64) * heads + head) * RECORD
        p_rows_out = p_out + first * o_t + head * o_h
        p_rows_v = p_v + first * v_t + head * v_h
        if PASS == FIRST:
            if middle:
                state = advance(
                    state, p_bf16, p_fp32, p_rows_v, p_rows_out, records, begin, end, length, has_values, real, heads,
                    v_t, o_t, block, K, C, VB, RECORD, False, PRECISE, PRECISION, STAGES,
                )  # fmt: skip
                begin = end
        if p_checkpoint is not None:
            at = tl.load(p_begin + n * begin_s)
            at_end = tl.load(p_begin + (n + 1) * begin_s)
            while begin < end:
                stop = end
                offset = tl.load(p_offset + at * offset_s, mask=at < at_end, other=0)
                while (at < at_end) & (offset <= begin * C):
                    at += 1
                    offset = tl.load(p_offset + at * offset_s, mask=at < at_end, other=0)
                if at < at_end:
                    stop = tl.minimum(end, (offset + C - 1) // C)
                state = advance(
                    state, p_bf16, p_fp32, p_rows_v, p_rows_out, records, begin, stop, length, has_values, real,
                    heads, v_t, o_t, block, K, C, VB, RECORD, True, PRECISE, PRECISION, STAGES,
                )  # fmt: skip
                while (at < at_end) & (offset <= stop * C):
                    slot = tl.load(p_slot + at * slot_s).to(tl.int64)
                    exact = (offset == stop * C) & (offset <= length)
                    tl.store(
                        p_checkpoint + _slot_offsets(slot, checkpoint_s, head, rows, channels, K, V, V_FIRST),
                        narrow(state, p_checkpoint.dtype.element_ty),
                        mask=real & exact & usable(slot, checkpoint_rows, -1),
                    )
                    at += 1
                    offset = tl.load(p_offset + at * offset_s, mask=at < at_end, other=0)
                begin = stop
        else:
            state = advance(
                state, p_bf16, p_fp32, p_rows_v, p_rows_out, records, begin, end, length, has_values, real, heads,
                v_t, o_t, block, K, C, VB, RECORD, True, PRECISE, PRECISION, STAGES,
            )  # fmt: skip

        is_last = (index == parts - 1) & (handed == 0)
        if PASS == SHARED:
            if handed:
                _hand_over(p_left, state, p_flag)
        if PASS == FIRST:
            here = part.to(tl.int64) * heads + head
            if has_values:
                tl.store(p_carry + here * (V * K) + carry_offset, state, mask=is_last == 0)
            else:
                p_transition = p_fp32 + transition_start.to(tl.int64) * 64 + here * (K * K)
                tl.store(p_transition + (rows - V)[:, None] * K + channels[None, :], state)
        if p_final is not None:
            tl.store(
                p_final + _slot_offsets(write_slot, final_s, head, rows, channels, K, V, V_FIRST),
                narrow(state, p_final.dtype.element_ty),
                mask=real & is_last,
            )

        high = start
