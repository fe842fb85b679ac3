"""The scan on compute capability 9.0: the same kernel, with its tiles advanced in Gluon.

What Triton decides is said here: the next tiles' records and values are copied to shared memory several tiles ahead, a
record is read once (kd is the operand of two products), nothing waits but the chain

    R = v - n (S kd)        U = R T        S <- decay S + U kd + U (kr - kd)

while outputs are taken beside it, and a tile has two barriers, both while the state is updated. Of U (kr - kd) only the
high part of U is taken. `scan` remains the judge: it runs under the interpreter.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from types import FunctionType

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import scan as portable


@gluon.jit
def _parts(x, LAYOUT: gl.constexpr):
    """x as two bfloat16 operands from registers. Both in one piece of code: `high` is packed once, not twice."""
    high, low = gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 a, $0, 16; and.b32 b, $0, 0xFFFF0000;"
        " sub.f32 a, $2, a; sub.f32 b, $3, b; cvt.rn.bf16x2.f32 $1, b, a; }",
        "=&r,=r,f,f", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return gl.convert_layout(high, LAYOUT), gl.convert_layout(low, LAYOUT)


@gluon.jit
def _narrow_if(x, kept, DTYPE: gl.constexpr):
    """x in half precision, or zeros where `kept` is not -1 but 0; a pair at a time."""
    if gl.bfloat16 == DTYPE:
        y = gl.inline_asm_elementwise(
            "{ .reg .b32 p; cvt.rn.bf16x2.f32 p, $2, $1; and.b32 $0, p, $3; }",
            "=r,f,f,r,r", [x, kept], dtype=gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = gl.inline_asm_elementwise(
            "{ .reg .b32 p; cvt.rn.f16x2.f32 p, $2, $1; and.b32 $0, p, $3; }",
            "=r,f,f,r,r", [x, kept], dtype=gl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return y


@gluon.jit
def _halves(x, R: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """As `scan._halves`; both stay where they are."""
    a, b = gl.split(gl.permute(gl.reshape(x, [R, 2, C]), [0, 2, 1]))
    return gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT)


@gluon.jit
def placed(state, K: gl.constexpr):
    """As `scan.placed`: an accumulator of the update."""
    return gl.set_auto_layout(state, gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16]))


@gluon.jit
def _fetch(
    near, fine, pairs, vectors, values, p_record, p_v, v_t, wanted, count, has_values,
    K: gl.constexpr, C: gl.constexpr, VB: gl.constexpr, OUTPUTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start copying a tile's record and the values of its `count` tokens into a stage, if it is wanted; without what
    only outputs need, qd and P, if there are none."""
    SIDES: gl.constexpr = 2 if OUTPUTS else 1
    BY_TOKEN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // VB, VB // 8], [WARPS, 1], [1, 0])
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [WARPS, 1], [1, 0])
    BY_PAIR: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // C, C // 8], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    if wanted:
        rows = gl.arange(0, SIDES * C, gl.SliceLayout(1, BY_ROW))[:, None]
        half = gl.arange(0, C, gl.SliceLayout(1, BY_ROW))[:, None]
        columns = gl.arange(0, K, gl.SliceLayout(0, BY_ROW))[None, :]
        async_copy.async_copy_global_to_shared(near, p_record + (2 - SIDES) * C * K + (rows * K + columns))
        async_copy.async_copy_global_to_shared(fine, p_record + 2 * C * K + (half * K + columns))
        pair_rows = gl.arange(0, SIDES * 2 * C, gl.SliceLayout(1, BY_PAIR))[:, None]
        if not OUTPUTS:
            pair_rows += C + pair_rows // C * C  # T and its low part alone
        pair_offsets = pair_rows * C + gl.arange(0, C, gl.SliceLayout(0, BY_PAIR))[None, :]
        async_copy.async_copy_global_to_shared(pairs, p_record + 3 * C * K + pair_offsets)
        p_vectors = (p_record + (3 * C * K + 4 * C * C)).to(gl.pointer_type(gl.float32), bitcast=True)
        index = gl.arange(0, 2 * K, FLAT)
        async_copy.async_copy_global_to_shared(vectors, p_vectors + index, index < K + 2 * C)
        token = gl.arange(0, C, gl.SliceLayout(1, BY_TOKEN))[:, None]
        value_rows = gl.arange(0, VB, gl.SliceLayout(0, BY_TOKEN))[None, :]
        async_copy.async_copy_global_to_shared(
            values, p_v + token.to(gl.int64) * v_t + value_rows, (token < count) & has_values
        )
    async_copy.commit_group()


@gluon.jit
def advance(
    state, p_bf16, p_fp32, p_v, p_out, records, begin, end, length, has_values, real, heads, v_t, o_t, block,
    K: gl.constexpr, C: gl.constexpr, VB: gl.constexpr, RECORD: gl.constexpr,
    OUTPUTS: gl.constexpr, PRECISE: gl.constexpr, PRECISION: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `scan.advance`, for half-precision inputs."""
    WARPS: gl.constexpr = gl.num_warps()
    SIDES: gl.constexpr = 2 if OUTPUTS else 1
    FROM: gl.constexpr = SIDES * C
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    KNOWN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, FROM, 16])
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, KNOWN, 2)
    UPDATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [WARPS, 1], [0, 1])  # of TILE, within each warp
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    VALUE: gl.constexpr = p_v.dtype.element_ty
    RESULT: gl.constexpr = p_out.dtype.element_ty
    NEAR_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([FROM, K], gl.bfloat16)
    PAIR_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDES * 2 * C, C], gl.bfloat16)
    TOKEN_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, VB], gl.bfloat16)

    near = gl.allocate_shared_memory(gl.bfloat16, [STAGES, FROM, K], NEAR_SHARED)
    fine = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], NEAR_SHARED)
    pairs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SIDES * 2 * C, C], PAIR_SHARED)
    vectors = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * K], PLAIN)  # decay [K] | n [C] | q_scale [C]
    values = gl.allocate_shared_memory(VALUE, [STAGES, C, VB], TOKEN_SHARED)

    first = begin.to(gl.int64)
    step = (records * 0 + heads) * (RECORD * 128)  # 64-bit, as the next two
    v_step = (records * 0 + v_t) * C
    o_step = (records * 0 + o_t) * C
    p_record = p_bf16 + records * 128 + first * step
    p_v += block * VB + first * v_step
    rows = block * VB + gl.arange(0, VB, gl.SliceLayout(1, OUT))
    lane = gl.arange(0, C, gl.SliceLayout(0, OUT))
    p_out += first * o_step
    out_offsets = lane.to(gl.int64)[None, :] * o_t + rows[:, None]
    for s in gl.static_range(STAGES - 1):
        _fetch(
            near.index(s), fine.index(s), pairs.index(s), vectors.index(s), values.index(s), p_record,
            p_v, v_t, begin + s < end, length - (begin + s) * C, has_values, K, C, VB, OUTPUTS, WARPS,
        )  # fmt: skip
        p_record += step
        p_v += v_step
    stage = begin * 0
    free = stage + (STAGES - 1)
    kept = gl.where(real, -1, 0)
    async_copy.wait_group(STAGES - 2)
    gl.thread_barrier()
    fence_async_shared()
    for i in range(begin, end):
        now_near = near.index(stage)
        now_pairs = pairs.index(stage)
        operand = gl.convert_layout(state.to(gl.bfloat16), OPERAND)
        known = warpgroup_mma(
            operand, now_near.permute((1, 0)), gl.zeros([VB, FROM], gl.float32, KNOWN), use_acc=False, is_async=True
        )
        v = values.index(stage).permute((1, 0)).load(TILE).to(gl.float32)
        n = vectors.index(stage).slice(K, C).load(gl.SliceLayout(0, TILE))
        state = state * vectors.index(stage).slice(0, K).load(gl.SliceLayout(0, STATE))[None, :]
        known = warpgroup_mma_wait(0, [known])
        if OUTPUTS:
            out, known = _halves(known, VB, C, TILE)
        high, low = _parts(v - gl.convert_layout(known, TILE) * n[None, :], OPERAND)
        pair_high = now_pairs.slice(0, FROM, 0).permute((1, 0))
        pair_low = now_pairs.slice(FROM, FROM, 0).permute((1, 0))
        u = warpgroup_mma(high, pair_high, gl.zeros([VB, FROM], gl.float32, KNOWN), use_acc=False, is_async=True)
        u = warpgroup_mma(low, pair_high, u, is_async=True)
        u = warpgroup_mma(high, pair_low, u, is_async=True)
        u = warpgroup_mma_wait(0, [u])
        if OUTPUTS:
            inner, u = _halves(u, VB, C, TILE)
        high, low = _parts(gl.convert_layout(u, TILE), UPDATE)
        keys = now_near.slice(FROM - C, C, 0)
        rest = fine.index(stage)
        state = warpgroup_mma(high, keys, state, is_async=True)
        state = warpgroup_mma(low, keys, state, is_async=True)
        state = warpgroup_mma(high, rest, state, is_async=True)
        if OUTPUTS:
            scale = vectors.index(stage).slice(K + C, C).load(gl.SliceLayout(0, TILE))
            out = _narrow_if((out + inner) * scale[None, :], kept, RESULT)
            gl.store(p_out + out_offsets, gl.convert_layout(out, OUT), mask=(lane < length - i * C)[None, :])
            p_out += o_step
        ahead = i + (STAGES - 1)
        gl.thread_barrier()  # none reads tile i - 1 any more
        _fetch(
            near.index(free), fine.index(free), pairs.index(free), vectors.index(free), values.index(free), p_record,
            p_v, v_t, ahead < end, length - ahead * C, has_values, K, C, VB, OUTPUTS, WARPS,
        )  # fmt: skip
        p_record += step
        p_v += v_step
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()  # tile i + 1 is there for all
        state = warpgroup_mma_wait(0, [state])
        fence_async_shared()  # these copies belong to the generic proxy, wgmma reads through the asynchronous one
        free = stage
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    async_copy.wait_group(0)
    gl.thread_barrier()  # the next call may fill these stages
    return state


def _in_gluon(fn: FunctionType) -> FunctionType:
    """The same function with Gluon's language for Triton's, and what is defined here for what it calls."""
    here = {"tl": gl, "advance": advance, "placed": placed}
    copy = FunctionType(fn.__code__, {**fn.__globals__, **here})
    functools.update_wrapper(copy, fn)
    return copy


scan_kernel = gluon.jit(
    _in_gluon(portable.scan_kernel.fn),
    do_not_specialize=portable.scan_kernel.do_not_specialize,
    do_not_specialize_on_alignment=portable.scan_kernel.do_not_specialize_on_alignment,
)
