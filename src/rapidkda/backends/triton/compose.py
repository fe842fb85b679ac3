"""Linking the parts of a segment: the carry of part p becomes the state after it, exactly.

    state after part p = (state after part p - 1) M_p + B_p        [V, K], in float32 to nearly all its digits

B_p (the carry) and M_p (the transition) are what `scan` left; part 0 ran from the true initial state, so its carry is
final, and nothing starts from the state after the last part, which leaves neither.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import dot_fp32, trips


@triton.jit(do_not_specialize=["segments", "carry_start", "transition_start", "heads"])
def compose_kernel(
    p_table, p_fp32, segments, carry_start, transition_start, heads,
    K: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, KB: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """VB value rows of one head of one segment. Grid (V / VB, HV, N); the *_start are in units of 256 bytes."""
    n = tl.program_id(2)
    head = tl.program_id(1).to(tl.int64)
    first = tl.load(p_table + segments + 1 + n)
    parts = tl.load(p_table + segments + 2 + n) - first
    rows = tl.program_id(0) * VB + tl.arange(0, VB)
    channels = tl.arange(0, K)
    p_carry = p_fp32 + carry_start.to(tl.int64) * 64 + (first.to(tl.int64) * heads + head) * (V * K)
    p_transition = p_fp32 + transition_start.to(tl.int64) * 64 + (first.to(tl.int64) * heads + head) * (K * K)
    step = (head * 0 + heads) * K  # 64-bit
    for p in range(1, trips(parts - 1)):
        state = tl.load(p_carry + (p - 1) * step * V + rows[:, None] * K + channels[None, :])
        p_here = p_carry + p * step * V + rows[:, None] * K
        for block in tl.range(0, K // KB, num_stages=STAGES):
            columns = block * KB + tl.arange(0, KB)
            transition = tl.load(p_transition + p * step * K + channels[:, None] * K + columns[None, :])
            own = tl.load(p_here + columns[None, :])
            tl.store(p_here + columns[None, :], own + dot_fp32(state, transition, PRECISION))
        tl.debug_barrier()  # every thread's columns are written before the next part reads them
