"""A step starts while the kernel before it runs, and reads nothing until that has ended."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton", minversion="3.6")

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from rapidkda import Segments, ops
from rapidkda.testing import Shape, make_inputs

pytestmark = pytest.mark.gpu
BATCH = 64


@triton.jit
def late_kernel(p_slots, p_new_slots, p_first, p_new_first, p_pool, p_new_pool, elements, N: tl.constexpr):
    """Lets the next kernel start, sleeps for 100 us, then writes what that reads."""
    gdc_launch_dependents()
    i = tl.arange(0, N)
    for _ in range(5):
        tl.inline_asm_elementwise(
            "nanosleep.u32 20000; mov.u32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.store(p_slots + i, tl.load(p_new_slots + i))
    tl.store(p_first + i, tl.load(p_new_first + i))
    for start in range(0, elements, N):
        tl.store(p_pool + start + i, tl.load(p_new_pool + start + i))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_tables_and_states_that_the_kernel_before_writes_late(state_dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels overlap from compute capability 9.0 on")
    inputs = make_inputs(Shape("decode", (1,) * BATCH, 2), "slow", dtype=torch.bfloat16, device="cuda")
    segments = Segments.equal(BATCH, 1, "cuda")
    new_pool = 0.1 * torch.randn(BATCH + 1, 2, 128, 128, device="cuda").to(state_dtype)
    new_slots = torch.randperm(BATCH, device="cuda").to(torch.int32)
    new_first = torch.randperm(BATCH, device="cuda").to(torch.int32)
    slots, pool, out = torch.empty_like(new_slots), torch.empty_like(new_pool), torch.empty_like(inputs.v)

    def step() -> None:
        options = inputs.options()
        ops.decode(*inputs.operands(), **options, segments=segments, state=pool, slots=slots, out=out, backend="triton")

    results = []
    for late in (False, True, True):
        slots.copy_(new_slots.roll(1))
        segments.first_token.copy_(new_first.flip(0))
        pool.fill_(float("nan"))
        out.fill_(float("nan"))
        slots[1], segments.first_token[2] = 1 << 29, -7  # nothing that could be read by mistake
        torch.cuda.synchronize()
        if late:
            late_kernel[(1,)](
                slots, new_slots, segments.first_token, new_first, pool, new_pool, pool.numel(), BATCH, num_warps=1
            )
        else:
            slots.copy_(new_slots)
            segments.first_token.copy_(new_first)
            pool.copy_(new_pool)
        step()
        torch.cuda.synchronize()
        results.append((out.clone(), pool.clone()))
    for got in results[1:]:
        assert all(map(torch.equal, results[0], got))
