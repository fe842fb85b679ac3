"""What verification by replay in Gluon asks L2 for before its turn, and does not use before it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .blocks import applied, spread, usable, within

LINE = gl.constexpr(128)  # bytes


@gluon.jit
def _bytes(p):
    """Bytes of an element at p."""
    return p.dtype.element_ty.primitive_bitwidth // 8


@gluon.jit
def _at(p, offset):
    """The address of the element that is `offset` from p, as a number."""
    return (p + offset).to(gl.int64, bitcast=True)


@gluon.jit
def _one_of(index, a, b, c, d):
    """The one of four that an index names."""
    return gl.where(index == 0, a, gl.where(index == 1, b, gl.where(index == 2, c, d)))


@gluon.jit
def _prefetch(at, wanted):
    """Ask L2 for the lines at the addresses that are wanted."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [at, wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def ask_ahead(
    p_q, p_k, p_v, p_g, p_records, p_first, p_length, p_slot, p_accepted, p_held,
    n, head, tokens, pool_rows, pad_slot, positions, q_t, k_t, v_t, g_t,
    first_s, length_s, slots_s, accepted_s, records_s, records_j,
    K: gl.constexpr, V: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    """Ask L2 for a head's tokens and records of request n, if the tables say by now what they will say later.

    p_q, p_k, p_v, p_g and p_records are at the head, of four warps each has an operand. The tables are read past the
    first cache, which would keep what the kernel before this one may overwrite.
    """
    slot = gl.load(p_slot + spread(n, slots_s), cache_modifier=".cg")
    accepted = gl.load(p_accepted + spread(n, accepted_s), cache_modifier=".cg")
    first = gl.load(p_first + spread(n, first_s), cache_modifier=".cg")
    length = gl.load(p_length + spread(n, length_s), cache_modifier=".cg")
    first, count = within(first, length, tokens)
    real = (count > 0) & usable(slot, pool_rows, pad_slot)
    slot = gl.where(real, slot, 0)
    taken = gl.where(real, gl.minimum(gl.maximum(accepted, 0), positions), 0).to(gl.int32)
    if p_held is not None:
        held = gl.load(p_held + (spread(slot, HEADS) + head), mask=taken > 0, other=0, cache_modifier=".cg")
        taken = applied(taken, held, positions)
    # Each warp asks for an operand of the tokens, then for some of the records
    TOKEN: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [4, 1, 1], [2, 1, 0])
    operand = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, TOKEN)))
    row = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, TOKEN)))[None, :, None]
    line = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, TOKEN)))[None, None, :]
    start = _one_of(operand, _at(p_k, spread(first, k_t)), _at(p_q, spread(first, q_t)), _at(p_v, spread(first, v_t)),
                    _at(p_g, spread(first, g_t)))  # fmt: skip
    stride = _one_of(operand, spread(_bytes(p_k), k_t), spread(_bytes(p_q), q_t), spread(_bytes(p_v), v_t),
                     spread(_bytes(p_g), g_t))  # fmt: skip
    size = _one_of(operand, K * _bytes(p_k), K * _bytes(p_q), V * _bytes(p_v), K * _bytes(p_g))
    at = start[:, None, None] + row.to(gl.int64) * stride[:, None, None] + line * LINE
    _prefetch(at, (row < count) & (line * LINE < size[:, None, None]))
    RECORD: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, FOLD, gl.SliceLayout(1, RECORD))
    line = gl.arange(0, 16, gl.SliceLayout(0, RECORD))[None, :]
    EACH: gl.constexpr = LINE // _bytes(p_records)
    at = _at(p_records + spread(slot, records_s), spread(row, records_j)[:, None] + line * EACH)
    _prefetch(at, (row < taken)[:, None] & (line * EACH < 2 * K + V))
