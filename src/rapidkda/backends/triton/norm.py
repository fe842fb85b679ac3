"""Gated RMSNorm per head: rms_norm(x) * weight * activation(z), of all tokens or of those of segments. One launch, any
strides but the last."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ...problem import NormCall
from . import launch, plan
from .blocks import narrow, sigmoid, within


@triton.jit(do_not_specialize=["tokens", "heads"], do_not_specialize_on_alignment=launch.TABLES)
def norm_kernel(
    p_x, p_z, p_weight, p_out, p_first, p_length, tokens, heads, eps,
    weight_s, x_t, x_h, z_t, z_h, o_t, o_h, first_s, length_s,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A program takes BR (token, head) rows. Grid (T * H / BR), or segments first, then the most that one of them needs
    along the other two axes: `plan.tile_grid`."""
    block = tl.program_id(0)
    if p_first is not None:
        block = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    start = block.to(tl.int64) * BR
    row = (start % heads).to(tl.int32) + tl.arange(0, BR)  # of the first token: one division in 64 bits, not BR
    token, head = start // heads + row // heads, (row % heads).to(tl.int64)
    if p_first is not None:
        n = tl.program_id(0).to(tl.int64)
        first, length = within(tl.load(p_first + n * first_s), tl.load(p_length + n * length_s), tokens)
        if start >= length.to(tl.int64) * heads:
            return
        token += first
        end = first + length
    else:
        end = tokens
    column = tl.arange(0, BD)
    mask = (token < end)[:, None] & (column < D)[None, :]
    x = tl.load(p_x + (token * x_t + head * x_h)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    z = tl.load(p_z + (token * z_t + head * z_h)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(p_weight + column * weight_s, mask=column < D, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, 1)
    y = x * tl.rsqrt(squares / D + eps)[:, None] * weight[None, :]
    gate = sigmoid(z)
    if SILU:
        gate = gate * z
    gate = tl.where((squares == 0)[:, None], 0.0, gate)  # a row of zeros stays one, whatever z holds there
    tl.store(
        p_out + (token * o_t + head * o_h)[:, None] + column[None, :],
        narrow(y * gate, p_out.dtype.element_ty),
        mask=mask,
    )


_norm = launch.Launcher(norm_kernel)


def norm(call: NormCall) -> None:
    """`Backend.norm`."""
    segments = call.segments
    if call.x.numel() == 0 or (segments is not None and (segments.count == 0 or segments.max_length == 0)):
        return
    prepared = call.memo.get("triton")
    if prepared is None:
        prepared = call.memo["triton"] = _bind(call)
    tables = (None, None) if segments is None else (segments.first_token, segments.length)
    prepared.alone(call, (call.x, call.z, call.weight, call.out), tables)


def _bind(call: NormCall) -> launch.Launch:
    tokens, heads, dim = call.x.shape
    padded = triton.next_power_of_2(dim)
    rows = max(1, 4096 // padded)
    grid, table_strides = (triton.cdiv(tokens * heads, rows), 1, 1), (0, 0)
    if call.segments is not None:
        grid = plan.tile_grid(triton.cdiv(call.segments.max_length * heads, rows), call.segments.count)
        table_strides = (call.segments.first_token.stride(0), call.segments.length.stride(0))
    return _norm.bind(
        call.x.device,
        grid,
        (tokens, heads, call.eps),
        (
            call.weight.stride(0),
            *call.x.stride()[:2],
            *call.z.stride()[:2],
            *call.out.stride()[:2],
            *table_strides,
        ),
        (dim, padded, rows, call.activation == "silu"),
        num_warps=4,
    )
