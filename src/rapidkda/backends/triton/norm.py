"""Gated RMSNorm per head: rms_norm(x) * weight * activation(z). One launch, any strides but the last."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ...problem import NormCall
from . import launch
from .blocks import narrow, sigmoid


@triton.jit(do_not_specialize=["rows_total", "heads"])
def norm_kernel(
    p_x, p_z, p_weight, p_out, rows_total, heads, eps,
    weight_s, x_t, x_h, z_t, z_h, o_t, o_h,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A program takes BR (token, head) rows. Grid (T * H / BR)."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    token, head = row // heads, row % heads
    column = tl.arange(0, BD)
    mask = (row < rows_total)[:, None] & (column < D)[None, :]
    x = tl.load(p_x + (token * x_t + head * x_h)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    z = tl.load(p_z + (token * z_t + head * z_h)[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(p_weight + column * weight_s, mask=column < D, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * weight[None, :]
    gate = sigmoid(z)
    if SILU:
        gate = gate * z
    tl.store(
        p_out + (token * o_t + head * o_h)[:, None] + column[None, :],
        narrow(y * gate, p_out.dtype.element_ty),
        mask=mask,
    )


_norm = launch.Launcher(norm_kernel)


def norm(call: NormCall) -> None:
    """`Backend.norm`."""
    if call.x.shape[0] == 0:
        return
    prepared = call.memo.get("triton")
    if prepared is None:
        prepared = call.memo["triton"] = _bind(call)
    prepared((call.x, call.z, call.weight, call.out), ())


def _bind(call: NormCall) -> launch.Launch:
    tokens, heads, dim = call.x.shape
    padded = triton.next_power_of_2(dim)
    rows = max(1, 4096 // padded)
    return _norm.bind(
        call.x.device,
        (triton.cdiv(tokens * heads, rows), 1, 1),
        (tokens * heads, heads, call.eps),
        (call.weight.stride(0), *call.x.stride()[:2], *call.z.stride()[:2], *call.out.stride()[:2]),
        (dim, padded, rows, call.activation == "silu"),
        num_warps=4,
    )
