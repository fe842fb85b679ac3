"""A step starts while the kernel before it runs, and uses nothing that it reads before that has ended."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the package triton", minversion="3.6")

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from rapidkda import Segments, ops
from rapidkda.testing import Shape, make_inputs

pytestmark = pytest.mark.gpu
BATCH = 64


@triton.jit
def late_kernel(olds, news, sizes: tl.constexpr):
    """Lets the next kernel start, sleeps for 100 us, then writes what that reads."""
    gdc_launch_dependents()
    i = tl.arange(0, 128)
    for _ in range(5):
        tl.inline_asm_elementwise(
            "nanosleep.u32 20000; mov.u32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1
        )
    for n in tl.static_range(len(sizes)):
        for start in range(0, sizes[n], 128):
            inside = start + i < sizes[n]
            tl.store(olds[n] + start + i, tl.load(news[n] + start + i, mask=inside), mask=inside)


def check(memory: dict[str, Tensor], before: dict[str, Tensor], step: Callable[[], None], out: Tensor) -> None:
    """That `step` yields the same outputs and memory if what it reads, `memory`, is written late, and was `before`."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels overlap from compute capability 9.0 on")
    after = {name: x.clone() for name, x in memory.items()}
    results = []
    for late in (False, True, True):
        for name, x in memory.items():
            x.copy_(before[name])
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        if late:
            sizes = tuple(x.numel() for x in memory.values())
            late_kernel[(1,)](tuple(memory.values()), tuple(after.values()), sizes, num_warps=4)
        else:
            for name, x in memory.items():
                x.copy_(after[name])
        step()
        torch.cuda.synchronize()
        results.append([x.clone() for x in (out, *memory.values())])
    for got in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], got, strict=True))


def other_tables(memory: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tables of other requests, with wild numbers, and no states."""
    before = {
        name: x.flip(0).contiguous() if x.dtype == torch.int32 else x * float("nan") for name, x in memory.items()
    }
    before["slots"][1], before["first"][2], before["length"][3] = 1 << 29, -7, 1 << 30
    return before


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_decode(state_dtype: torch.dtype) -> None:
    inputs = make_inputs(Shape("decode", (1,) * BATCH, 2), "slow", dtype=torch.bfloat16, device="cuda")
    segments = Segments.equal(BATCH, 1, "cuda")
    segments.first_token.copy_(torch.randperm(BATCH, device="cuda"))
    pool = 0.1 * torch.randn(BATCH + 1, 2, 128, 128, device="cuda").to(state_dtype)
    slots = torch.randperm(BATCH, device="cuda").to(torch.int32)
    out = torch.empty_like(inputs.v)
    memory = {"slots": slots, "first": segments.first_token, "length": segments.length, "pool": pool}

    def step() -> None:
        options = inputs.options()
        ops.decode(*inputs.operands(), **options, segments=segments, state=pool, slots=slots, out=out, backend="triton")

    check(memory, other_tables(memory), step, out)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_verification_by_replay(state_dtype: torch.dtype) -> None:
    """Its programs look at the tables before the kernel before them has ended, to prefetch."""
    inputs = make_inputs(Shape("verify", (4,) * BATCH, 2), "slow", dtype=torch.bfloat16, device="cuda")
    segments = Segments.equal(BATCH, 4, "cuda")
    segments.first_token.copy_(4 * torch.randperm(BATCH, device="cuda"))
    pool = 0.1 * torch.randn(BATCH + 1, 2, 128, 128, device="cuda").to(state_dtype)
    records = 0.1 * torch.randn(BATCH + 1, 12, 2, 3 * 128, device="cuda")
    records[..., 128:256].abs_().neg_()
    slots = torch.randperm(BATCH, device="cuda").to(torch.int32)
    accepted = torch.randint(0, 5, (BATCH,), device="cuda").to(torch.int32)
    held = torch.randint(0, 8, (BATCH + 1, 2), device="cuda").to(torch.int32)
    out = torch.empty_like(inputs.v)
    memory = {
        "slots": slots,
        "first": segments.first_token,
        "length": segments.length,
        "accepted": accepted,
        "held": held,
        "pool": pool,
        "records": records,
    }

    def step() -> None:
        ops.verify(
            *inputs.operands(),
            **inputs.options(),
            segments=segments,
            state=pool,
            slots=slots,
            accepted=accepted,
            records=records,
            held=held,
            out=out,
            backend="triton",
        )

    check(memory, other_tables(memory), step, out)
