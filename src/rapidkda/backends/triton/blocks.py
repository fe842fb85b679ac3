"""Device functions that the kernels share: activations, slots, powers of two, and the dot products.

Names: `p_` marks pointers. All address arithmetic is 64-bit: an index is widened before it meets a stride.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import target_info
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ... import env

# Triton's interpreter multiplies bfloat16 operands wrongly, so there they are widened first.
INTERPRETED = tl.constexpr(env.flag("TRITON_INTERPRET"))

LOG_DECAY = tl.constexpr(0)  # the kinds of gate, see rapidkda.problem.Gate
BOUNDED = tl.constexpr(1)

FLT_MAX = tl.constexpr(3.4028234e38)
L2_EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def take_turn():
    """Wait for the kernel before this one, then let the next one start; sooner, one after another would sit and wait
    where the programs of this one belong."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def dot(a, b):
    """a [M, K] @ b [K, N] of half-precision operands, float32 accumulation."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def add_dot(total, a, b):
    """total + a @ b."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def dot_fp32(a, b, PRECISION: tl.constexpr):
    """a @ b of float32 operands to nearly float32; PRECISION is what the target's matrix units offer for that."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _tf32(x):
    """x, to the nearest TF32 number."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def without_product(total, a, b, PRECISION: tl.constexpr):
    """total - a @ b of finite float32 operands, to nearly float32. The three parts do not wait for each other, as they
    would if they added up in one accumulator."""
    if PRECISION == "tf32x3":
        a_head, b_head = _tf32(a), _tf32(b)
        total -= tl.dot(a_head, b - b_head, input_precision="tf32")
        total -= tl.dot(a_head, b_head, input_precision="tf32")
        total -= tl.dot(a - a_head, b_head, input_precision="tf32")
    else:
        total -= tl.dot(a, b, input_precision=PRECISION)
    return total


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 to DTYPE, to nearest even. Triton's interpreter truncates to bfloat16, so there it is rounded first."""
    if INTERPRETED:
        if tl.bfloat16 == DTYPE:
            bits = x.to(tl.int32, bitcast=True)
            x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def rounded(x):
    """float32 to the nearest bfloat16, as float32. A pair at a time: alone, a number takes a slow conversion."""
    if not INTERPRETED:
        if target_info.is_cuda():
            return tl.inline_asm_elementwise(
                "{ .reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xFFFF0000; }",
                "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
            )  # fmt: skip
    return narrow(x, tl.bfloat16).to(tl.float32)


@triton.jit
def widened(x):
    """x as float32. A pair of bfloat16 numbers at a time: two instructions, not three."""
    if not INTERPRETED:
        if target_info.is_cuda():
            if x.dtype == tl.bfloat16:
                return tl.inline_asm_elementwise(
                    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
                    "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
                )  # fmt: skip
    return x.to(tl.float32)


@triton.jit
def high_low(x):
    """x as a sum of two bfloat16 numbers, 16 bits of mantissa together; the first is cut off, not rounded."""
    bits = x.to(tl.int32, bitcast=True) & -65536
    rest = x - bits.to(tl.float32, bitcast=True)
    if INTERPRETED:
        high = bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    else:
        high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, narrow(rest, tl.bfloat16)


@triton.jit
def power_of_two(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The largest power of two at most x (x >= 0, float32), kept within 2^LOW .. 2^HIGH, and its inverse. Exact."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, (LOW + 127) << 23), (HIGH + 127) << 23)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def divide(x, y):
    """x / y, y >= 1, to two units in the last place; 0 where y > 2^126. A plain division takes four times as long."""
    if INTERPRETED:
        return x / y
    if target_info.is_cuda():
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    return libdevice.fast_dividef(x, y)


@triton.jit
def exp2(x):
    """2^x to two units in the last place; what is below 2^-126 may be 0, which saves three instructions of four."""
    if INTERPRETED:
        return tl.exp2(x)
    if target_info.is_cuda():
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def exp2_of_negative(x):
    """2^-x as `exp2`; the sign costs an instruction unless it is part of the same one."""
    if not INTERPRETED:
        if target_info.is_cuda():
            return tl.inline_asm_elementwise(
                "{ .reg .f32 n; neg.f32 n, $1; ex2.approx.ftz.f32 $0, n; }",
                "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
    return exp2(-x)


@triton.jit
def log2(x):
    """log2(x), x >= 1, to 2^-22."""
    if INTERPRETED:
        return tl.log2(x)
    if target_info.is_cuda():
        return libdevice.fast_log2f(x)
    return tl.log2(x)


@triton.jit
def exp(x):
    """exp(x); results below 2^-126 are 0."""
    return exp2(x * LOG2_E)


@triton.jit
def sigmoid(x):
    return divide(1.0, 1.0 + exp2(x * -LOG2_E))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to float32 accuracy on both tails; slow decays live on the left one."""
    y = exp(tl.minimum(x, 20.0))
    series = y * (1.0 - y * (0.5 - y * (0.33333333 - y * 0.25)))
    return tl.where(x > 20.0, x, tl.where(y < 0.03, series, log2(1.0 + y) * LN_2))


@triton.jit
def amplitude(p_a_log, head):
    """exp(A_log), finite: an infinite one would turn a zero logit into NaN."""
    return amplitude_of(tl.load(p_a_log + head))


@triton.jit
def amplitude_of(a_log):
    return tl.minimum(tl.exp(a_log), FLT_MAX)


@triton.jit
def gate_bias(p_dt_bias, head, channels, K: tl.constexpr, SIZE: tl.constexpr):
    """The gate's bias of a head at `channels` [SIZE]; 0 where there is none."""
    bias = tl.zeros([SIZE], tl.float32)
    if p_dt_bias is not None:
        bias = tl.load(p_dt_bias + head * K + channels)
    return bias


@triton.jit
def log_decay(x, bias, p_a_log, lower_bound, head, GATE: tl.constexpr, UNIT: tl.constexpr):
    """UNIT times the log decay of gate inputs x [..., K] (float32); `bias` is `gate_bias`, shaped to broadcast."""
    size = 1.0
    if p_a_log is not None:
        size = amplitude(p_a_log, head)
    return gate_decay(x, bias, size, lower_bound, GATE, UNIT)


@triton.jit
def gate_decay(x, bias, size, lower_bound, GATE: tl.constexpr, UNIT: tl.constexpr):
    """`log_decay` of a gate whose `amplitude` is known."""
    if GATE == LOG_DECAY:
        return x * UNIT
    if GATE == BOUNDED:
        return divide(lower_bound * UNIT, 1.0 + exp2((x + bias) * tl.maximum(-LOG2_E * size, -FLT_MAX)))
    return softplus(x + bias) * tl.maximum(-UNIT * size, -FLT_MAX)


@triton.jit
def write_strength(x, beta_scale, LOGITS: tl.constexpr):
    """Write strength b of the inputs beta (float32)."""
    if LOGITS:
        x = sigmoid(x) * beta_scale
    return x


@triton.jit
def spread(index, stride):
    """index * stride in 64 bits. Neither is negative: known to be so, the product takes one instruction, not three."""
    stride = index * 0 + stride
    if stride.dtype == tl.int64:
        return index.to(tl.int64) * stride
    return (index.to(tl.uint32).to(tl.uint64) * stride.to(tl.uint32).to(tl.uint64)).to(tl.int64)


@triton.jit
def trips(count):
    """A loop bound. Triton 3.6's interpreter cannot take a tensor for one under NumPy 2.4, so there it is unwrapped."""
    if INTERPRETED:
        return count.handle.data.item()
    return count


@triton.jit
def within(first, length, tokens):
    """A segment's first token and length, brought into the tokens of the call, whatever its table says."""
    first = tl.minimum(tl.maximum(first, 0), tokens)
    return first, tl.minimum(tl.maximum(length, 0), tokens - first)


@triton.jit
def applied(accepted, held, positions):
    """How many of `positions` records are applied: `accepted` of the last step, and what lay before those of it."""
    return tl.minimum(accepted + tl.minimum(tl.maximum(held, 0), positions), positions)


@triton.jit
def with_held(p_held, at, accepted, positions):
    """The same with p_held[at], which says nothing where none are accepted."""
    held = tl.load(p_held + at, mask=accepted > 0, other=0)
    return applied(accepted, held, positions)


@triton.jit
def usable(slot, rows, pad_slot):
    """Does this slot name a row of a pool of `rows` rows?"""
    return (slot != pad_slot) & (slot >= 0) & (slot < rows)
