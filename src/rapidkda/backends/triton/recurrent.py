"""The token recurrence on pools: decode, speculative verification with a slot a position, and commit. One launch each.
Verification by replay is in pair.py, chunk.py and replay_sm90.py, where all value rows of a head belong to one program,
since all of them read the same records.

A program owns VB value rows of one head of one request and keeps them in registers; the value rows of a state are
independent.

    S = S exp(g)      u = b (v - S k)      S = S + u k^T      o = scale S q        S [V, K]
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import CommitCall, DecodeCall, VerifyCall
from . import chunk, config, launch, pair
from .blocks import (
    L2_EPS,
    amplitude_of,
    exp,
    gate_decay,
    narrow,
    take_turn,
    trips,
    usable,
    with_held,
    within,
    write_strength,
)

SM90_ROWS = 16  # value rows of a program in Gluon: those of a product of the matrix units


@triton.jit
def _state_offsets(head, rows, channels, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Offsets of a [rows, channels] tile inside a slot."""
    base = head * (K * V)
    if V_FIRST:
        return base + rows[:, None] * K + channels[None, :]
    return base + channels[None, :] * V + rows[:, None]


@triton.jit
def _load_token(
    p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, token, some, head, group, channels, rows,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h, K: tl.constexpr,
):  # fmt: skip
    """What one token needs, as it is stored: q, k, g and the gate's bias [K], v [VB], beta and A_log. Nothing is read
    where `some` is False."""
    q = tl.load(p_q + token * q_t + (head // group) * q_h + channels, mask=some)
    k = tl.load(p_k + token * k_t + (head // group) * k_h + channels, mask=some)
    v = tl.load(p_v + token * v_t + head * v_h + rows, mask=some)
    g = tl.load(p_g + token * g_t + head * g_h + channels, mask=some)
    b = tl.load(p_beta + token * b_t + head * b_h, mask=some)
    bias = tl.zeros([K], tl.float32)
    if p_dt_bias is not None:
        bias = tl.load(p_dt_bias + head * K + channels, mask=some)
    a_log = 0.0
    if p_a_log is not None:
        a_log = tl.load(p_a_log + head, mask=some)
    return q, k, v, g, b, bias, a_log


@triton.jit
def _activate(loaded, scale, beta_scale, lower_bound, GATE: tl.constexpr, LOGITS: tl.constexpr, L2NORM: tl.constexpr):
    """A loaded token in float32: the query with its scale, key, values, log decay and write strength."""
    q, k, v, g, b, bias, a_log = loaded
    q, k = q.to(tl.float32), k.to(tl.float32)
    if L2NORM:
        q = q * tl.rsqrt(tl.sum(q * q, 0) + L2_EPS)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)
    g = gate_decay(g.to(tl.float32), bias, amplitude_of(a_log), lower_bound, GATE, 1.0)
    return q * scale, k, v.to(tl.float32), g, write_strength(b.to(tl.float32), beta_scale, LOGITS)


@triton.jit
def _advance(state, k, g, u):
    """A token whose correction u [VB] is known, on a state tile [VB, K]."""
    return state * exp(g)[None, :] + u[:, None] * k[None, :]


@triton.jit
def _step(state, q, k, v, g, b):
    """A token on a state tile [VB, K]. Returns the next state and the output [VB]."""
    state = state * exp(g)[None, :]  # both sums over it do not wait for each other
    u = b * (v - tl.sum(state * k[None, :], 1))
    out = tl.sum(state * q[None, :], 1) + u * tl.sum(k * q, 0)
    return state + u[:, None] * k[None, :], out


@triton.jit(do_not_specialize=launch.STEP_SIZES, do_not_specialize_on_alignment=launch.TABLES)
def step_kernel(
    p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, p_out, p_pool, p_first, p_length, p_read, p_write, p_accepted,
    tokens, pool_rows, pad_slot, positions, group, scale, beta_scale, lower_bound,
    q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h, o_t, o_h,
    first_s, length_s, read_s, write_s, write_j, accepted_s, pool_s,
    GATE: tl.constexpr, LOGITS: tl.constexpr, L2NORM: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    VB: tl.constexpr, V_FIRST: tl.constexpr, VERIFY: tl.constexpr, EVICT: tl.constexpr, WRITE: tl.constexpr,
    HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Decode (one token, read and write slots) or slot-per-position verification (VERIFY). Grid (N * V / VB, HV), or
    with all HEADS of a request side by side, (N * HEADS * V / VB)."""
    if HEADS == 0:
        n = (tl.program_id(0) // (V // VB)).to(tl.int64)
        head = tl.program_id(1).to(tl.int64)
    else:
        n = (tl.program_id(0) // (V // VB * HEADS)).to(tl.int64)
        head = (tl.program_id(0) // (V // VB) % HEADS).to(tl.int64)
    rows = (tl.program_id(0) % (V // VB)) * VB + tl.arange(0, VB)
    channels = tl.arange(0, K)
    if OVERLAP:
        take_turn()
    first, count = within(tl.load(p_first + n * first_s), tl.load(p_length + n * length_s), tokens)
    first = first.to(tl.int64)
    if VERIFY:
        accepted = tl.load(p_accepted + n * accepted_s).to(tl.int64)
        start = tl.minimum(tl.maximum(accepted, 1), positions) - 1
        slot = tl.load(p_read + n * read_s + start * write_j).to(tl.int64)
        real = usable(slot, pool_rows, pad_slot)
        count = tl.minimum(count, positions)
    else:
        slot = tl.load(p_read + n * read_s).to(tl.int64)
        target = tl.load(p_write + n * write_s).to(tl.int64)
        real = usable(slot, pool_rows, pad_slot) & usable(target, pool_rows, pad_slot)
        count = tl.minimum(count, 1)
    offsets = _state_offsets(head, rows, channels, K, V, V_FIRST)
    p_read_state = p_pool + slot * pool_s + offsets
    state = tl.load(p_read_state, mask=real & (count > 0), other=0.0, eviction_policy=EVICT).to(tl.float32)
    if VERIFY:
        for j in range(0, trips(count)):
            token = first + j
            loaded = _load_token(
                p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, token, None, head, group, channels, rows,
                q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h, K,
            )  # fmt: skip
            q, k, v, g, b = _activate(loaded, scale, beta_scale, lower_bound, GATE, LOGITS, L2NORM)
            state, out = _step(state, q, k, v, g, b)
            out = narrow(tl.where(real, out, 0.0), p_out.dtype.element_ty)
            tl.store(p_out + token * o_t + head * o_h + rows, out)
            target = tl.load(p_write + n * write_s + j * write_j).to(tl.int64)
            keep = real & usable(target, pool_rows, pad_slot)
            p_write_state = p_pool + target * pool_s + offsets
            tl.store(p_write_state, narrow(state, p_pool.dtype.element_ty), mask=keep, cache_modifier=WRITE)
    else:
        # All that the program needs is asked for before the branch: it is two round trips to the memory long. (Without
        # masks the compiler would move some of the loads behind it.)
        some = count > 0
        loaded = _load_token(
            p_q, p_k, p_v, p_g, p_beta, p_a_log, p_dt_bias, first, some, head, group, channels, rows,
            q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, b_t, b_h, K,
        )  # fmt: skip
        if some:
            q, k, v, g, b = _activate(loaded, scale, beta_scale, lower_bound, GATE, LOGITS, L2NORM)
            state, out = _step(state, q, k, v, g, b)
            out = narrow(tl.where(real, out, 0.0), p_out.dtype.element_ty)
            tl.store(p_out + first * o_t + head * o_h + rows, out)
            p_write_state = p_pool + target * pool_s + offsets
            tl.store(p_write_state, narrow(state, p_pool.dtype.element_ty), mask=real, cache_modifier=WRITE)


@triton.jit
def _replay(
    state, p_records, record_j, taken, head, rows, channels, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr
):
    """Fold the first `taken` records of a slot into a state tile. Records past that are never read."""
    for j in range(0, trips(taken)):
        p_record = p_records + j * record_j + head * WIDTH
        k = tl.load(p_record + channels)
        g = tl.load(p_record + K + channels)
        u = tl.load(p_record + 2 * K + rows)
        state = _advance(state, k, g, u)
    return state


@triton.jit(do_not_specialize=launch.STEP_SIZES, do_not_specialize_on_alignment=launch.TABLES)
def commit_kernel(
    p_pool, p_records, p_slot, p_accepted, p_held, pool_rows, pad_slot, positions,
    slots_s, accepted_s, pool_s, records_s, records_j,
    K: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """Fold the accepted records into the states. Grid (N * V / VB, HV)."""
    n = (tl.program_id(0) // (V // VB)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) % (V // VB)) * VB + tl.arange(0, VB)
    channels = tl.arange(0, K)
    slot = tl.load(p_slot + n * slots_s).to(tl.int64)
    taken = tl.minimum(tl.maximum(tl.load(p_accepted + n * accepted_s).to(tl.int64), 0), positions).to(tl.int32)
    if usable(slot, pool_rows, pad_slot) & (taken > 0):
        if p_held is not None:
            taken = with_held(p_held, slot * tl.num_programs(1) + head, taken, positions)
        p_state = p_pool + slot * pool_s + _state_offsets(head, rows, channels, K, V, V_FIRST)
        state = tl.load(p_state).to(tl.float32)
        state = _replay(state, p_records + slot * records_s, records_j, taken, head, rows, channels, K, V, 2 * K + V)
        tl.store(p_state, narrow(state, p_pool.dtype.element_ty))


def value_block(key_dim: int, value_dim: int, state_dtype: torch.dtype) -> int:
    """Value rows of a program of one warp: 4 KiB of state in registers."""
    return min(value_dim, (1024 if state_dtype == torch.float32 else 2048) // key_dim)


_steps = launch.Launcher(step_kernel)
_commit = launch.Launcher(commit_kernel)


@functools.cache
def sm90_steps() -> launch.Launcher:
    from .recurrent_sm90 import step_kernel

    return launch.Launcher(step_kernel)


@functools.cache
def sm90_replays() -> launch.Launcher:
    from .replay_sm90 import replay_kernel

    return launch.Launcher(replay_kernel)


def decode(call: DecodeCall) -> None:
    """`Backend.decode`."""
    if call.segments.count == 0 or call.tokens.count == 0:
        return
    wide = call.memo.get("triton wide")
    if wide is None:
        wide = call.memo["triton wide"] = _wide(call)
    tokens = call.tokens
    if wide and not any(x.data_ptr() % 16 for x in (tokens.q, tokens.k, tokens.v, tokens.g, call.pool)):
        _run_sm90(call)
    else:
        _run_step(call, call.read_slots, call.write_slots, None)


def _wide(call: DecodeCall) -> bool:
    """Whether copies of 16 bytes can take everything where it lies, as the kernel in Gluon wants it."""
    tokens, pool = call.tokens, call.pool
    if not config.machine(pool.device).gluon or pool.dtype != torch.bfloat16 or not call.state_v_first:
        return False
    strides = [stride for x in (tokens.q, tokens.k, tokens.v, tokens.g) for stride in x.stride()[:2]]
    return tokens.key_dim == 128 and not any(stride % 16 for stride in (*strides, pool.stride(0)))


def _run_sm90(call: DecodeCall) -> None:
    prepared = call.memo.get("triton sm_90")
    if prepared is None:
        prepared = call.memo["triton sm_90"] = _bind_sm90(call)
    segments = call.segments
    prepared.alone(
        call,
        (*launch.inputs(call.tokens), call.out, call.pool),
        (segments.first_token, segments.length, call.read_slots, call.write_slots),
    )


def _bind_sm90(call: DecodeCall) -> launch.Launch:
    tokens, segments, pool = call.tokens, call.segments, call.pool
    heads = tokens.value_heads
    return sm90_steps().bind(
        pool.device,
        (segments.count * heads * (tokens.value_dim // SM90_ROWS), 1, 1),
        (tokens.count, pool.shape[0], call.pad_slot, *launch.scalars(tokens)),
        (
            *launch.strides(tokens),
            *call.out.stride()[:2],
            segments.first_token.stride(0),
            segments.length.stride(0),
            call.read_slots.stride(0),
            call.write_slots.stride(0),
            pool.stride(0),
        ),
        (*launch.constants(tokens), SM90_ROWS, heads, heads // tokens.heads),
        num_warps=1,
        overlap=True,
    )


def verify(call: VerifyCall) -> None:
    """`Backend.verify`, all forms."""
    if call.segments.count == 0 or call.tokens.count == 0:
        return
    if call.records is None:
        _run_step(call, call.slots, call.slots, call.accepted)
    else:
        _run_replay(call, call.records)


def _run_step(call: DecodeCall | VerifyCall, read: Tensor, write: Tensor, accepted: Tensor | None) -> None:
    prepared = call.memo.get("triton")
    if prepared is None:
        prepared = call.memo["triton"] = _bind_step(call, read, write, accepted)
    segments = call.segments
    prepared.alone(
        call,
        (*launch.inputs(call.tokens), call.out, call.pool),
        (segments.first_token, segments.length, read, write, accepted),
    )


def _bind_step(call: DecodeCall | VerifyCall, read: Tensor, write: Tensor, accepted: Tensor | None) -> launch.Launch:
    tokens, segments, pool = call.tokens, call.segments, call.pool
    block = value_block(tokens.key_dim, tokens.value_dim, pool.dtype)
    positions = 1 if accepted is None else read.shape[1]
    # Measured on an H200: states in bfloat16 gain from leaving the cache at once, those in float32 lose. Decode of the
    # latter gains from heads of a request side by side, that of the former loses.
    wide = pool.dtype == torch.float32
    caching = ("", "") if wide else ("evict_first", ".cs")
    heads = tokens.value_heads if wide and accepted is None else 0
    blocks = segments.count * (tokens.value_dim // block)
    group = tokens.value_heads // tokens.heads
    overlap = config.machine(pool.device).overlap
    return _steps.bind(
        pool.device,
        (blocks * heads, 1, 1) if heads else (blocks, tokens.value_heads, 1),
        (tokens.count, pool.shape[0], call.pad_slot, positions, group, *launch.scalars(tokens)),
        (
            *launch.strides(tokens),
            *call.out.stride()[:2],
            segments.first_token.stride(0),
            segments.length.stride(0),
            read.stride(0),
            write.stride(0),
            write.stride(1) if accepted is not None else 0,
            launch.stride(accepted),
            pool.stride(0),
        ),
        (*launch.constants(tokens), block, call.state_v_first, accepted is not None, *caching, heads, overlap),
        num_warps=1,
        overlap=overlap,
    )


def _run_replay(call: VerifyCall, records: Tensor) -> None:
    gluon = call.memo.get("triton gluon")
    if gluon is None:
        gluon = call.memo["triton gluon"] = _fits_gluon(call, records)
    gluon = gluon and call.pool.data_ptr() % 16 == 0  # copies of 16 bytes take the states where they lie
    key = "triton sm_90" if gluon else "triton"
    prepared = call.memo.get(key)
    if prepared is None:
        prepared = call.memo[key] = _bind_replays(call, records, gluon)
    segments = call.segments
    data = (*launch.inputs(call.tokens), call.out, call.pool, records)
    tables = (segments.first_token, segments.length, call.slots, call.accepted, call.held)
    own, *others = prepared
    if own.alone(call, data, tables):  # the first call of its kind: none that may follow must compile then
        for other in others:
            other(data, tables, compile_only=True)


def _fits_gluon(call: VerifyCall, records: Tensor) -> bool:
    """Whether the kernel in Gluon takes calls like this one, if their requests are short enough."""
    tokens, pool = call.tokens, call.pool
    return (
        config.replays(
            config.machine(pool.device),
            tokens.q.dtype,
            tokens.key_dim,
            tokens.value_dim,
            call.state_v_first,
            records.shape[1],
        )
        and pool.stride(0) % 16 == 0
    )


def _bind_replays(call: VerifyCall, records: Tensor, gluon: bool) -> list[launch.Launch]:
    """The launch of this call, then, where the length of requests decides, those of other calls with these records."""
    rows = records.shape[1]
    longest = rows if call.held is None else min(rows, call.segments.max_length)
    size = min(chunk.MOST, max(2, triton.next_power_of_2(longest)))  # tokens of a chunk
    short = _bind_replay_sm90 if gluon else _bind_replay  # requests that are one chunk
    own = short if longest <= chunk.MOST else _bind_replay
    launches = [*own(call, records, size)]
    if call.held is None:
        return launches
    for other in (2, 4, 8):
        if other < 2 * rows and (other, short) != (size, own):
            launches += short(call, records, other)
    if rows > chunk.MOST and own is not _bind_replay:
        launches += _bind_replay(call, records, chunk.MOST)
    return launches


def _bind_replay_sm90(call: VerifyCall, records: Tensor, size: int) -> tuple[launch.Launch]:
    """Chunks of `size` tokens, in Gluon. How many programs share a multiprocessor, as was measured best: three with
    more than 16 records; else four with bfloat16 states; with float32 ones four with chunks of 8, but two where every
    step stores the states, and three with smaller chunks. As many ask L2 ahead, with bfloat16 states and chunks of 8
    also those that come next."""
    tokens, segments, pool = call.tokens, call.segments, call.pool
    heads, positions = tokens.value_heads, records.shape[1]
    narrow = pool.dtype == torch.bfloat16
    if positions > 16:
        shared_by = 3
    elif narrow:
        shared_by = 4
    elif size < 8:
        shared_by = 3
    else:
        shared_by = 2 if call.held is None else 4
    bound = sm90_replays().bind(
        pool.device,
        (segments.count * heads, 1, 1),
        (tokens.count, pool.shape[0], call.pad_slot, positions, *launch.scalars(tokens)),
        (
            *launch.strides(tokens),
            *call.out.stride()[:2],
            segments.first_token.stride(0),
            segments.length.stride(0),
            call.slots.stride(0),
            call.accepted.stride(0),
            pool.stride(0),
            *records.stride()[:2],
        ),
        (
            *launch.constants(tokens),
            heads,
            heads // tokens.heads,
            size,
            max(8, triton.next_power_of_2(positions)),
            (2 if narrow and size == 8 else 1) * shared_by * config.machine(pool.device).units,
        ),
        num_warps=4,
        registers=128 if shared_by == 4 else 168,
        overlap=True,
    )
    return (bound,)


def _bind_replay(call: VerifyCall, records: Tensor, size: int) -> tuple[launch.Launch, launch.Launch]:
    """Chunks of `size` tokens: the launch of this call, and that of a call with another batch. Where two programs have
    a multiprocessor to themselves, each has more warps and more value rows at once."""
    tokens, segments, pool = call.tokens, call.segments, call.pool
    machine = config.machine(pool.device)
    positions = records.shape[1]
    chunked = size > pair.MOST
    launcher = chunk.launcher if chunked else pair.launcher
    programs = segments.count * tokens.value_heads
    group = tokens.value_heads // tokens.heads

    def bind(elements: int, warps: int, registers: int | None = None) -> launch.Launch:
        return launcher.bind(
            pool.device,
            (programs, 1, 1),
            (tokens.count, pool.shape[0], call.pad_slot, positions, group, *launch.scalars(tokens)),
            (
                *launch.strides(tokens),
                *call.out.stride()[:2],
                segments.first_token.stride(0),
                segments.length.stride(0),
                call.slots.stride(0),
                call.accepted.stride(0),
                pool.stride(0),
                *records.stride()[:2],
            ),
            (
                *launch.constants(tokens),
                min(tokens.value_dim, elements // tokens.key_dim),
                call.state_v_first,
                tokens.value_heads,
                *(chunk.constants(size, machine.precision) if chunked else ()),
                warps,
            ),
            num_warps=warps,
            registers=registers,
        )

    most = pair.REGISTERS if call.held is not None and machine.vendor == "nvidia" else None
    few, many = (bind(8192, 4), bind(4096, 2)) if chunked else (bind(16384, 8), bind(4096, 4, most))
    return (few, many) if programs <= 2 * machine.units else (many, few)


def commit(call: CommitCall) -> None:
    """`Backend.commit`."""
    if call.slots.shape[0] == 0:
        return
    prepared = call.memo.get("triton")
    if prepared is None:
        prepared = call.memo["triton"] = _bind_commit(call)
    prepared.alone(call, (call.pool, call.records), (call.slots, call.accepted, call.held))


def _bind_commit(call: CommitCall) -> launch.Launch:
    pool, records = call.pool, call.records
    heads, *inner = pool.shape[1:]
    value_dim, key_dim = inner if call.state_v_first else reversed(inner)
    block = value_block(key_dim, value_dim, pool.dtype)
    return _commit.bind(
        pool.device,
        (call.slots.shape[0] * (value_dim // block), heads, 1),
        (pool.shape[0], call.pad_slot, records.shape[1]),
        (call.slots.stride(0), call.accepted.stride(0), pool.stride(0), *records.stride()[:2]),
        (key_dim, value_dim, block, call.state_v_first),
        num_warps=1,
    )
