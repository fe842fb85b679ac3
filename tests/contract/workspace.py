"""Scratch memory: declared, sufficient, and all there is."""

from __future__ import annotations

import torch

from rapidkda import Segments, Sizes
from rapidkda.testing import activated

from .cases import case
from .guards import fail, same_bits
from .target import NotHere, Target


def planned(target: Target, tokens: int, segments: int, dtype: torch.dtype) -> int:
    sizes = Sizes(tokens=tokens, segments=segments, heads=2, value_heads=2, dtype=dtype)
    return target.backend.workspace_bytes("prefill", sizes)


@case("B87", lens=((1,), (130,), (20, 0, 65, 3)))
def declared_workspace_suffices(target: Target, lens: tuple[int, ...]) -> None:
    """A workspace of exactly the declared size, full of garbage, gives the bits of a call without one."""
    inputs = activated([target.tokens(n) for n in lens], dtype=target.dtype, device=target.device, seed=87)
    needed = planned(target, inputs.q.shape[0], len(lens), target.dtype)
    guard = 4096
    memory = torch.full((needed + 2 * guard,), 0xA5, dtype=torch.uint8, device=target.device)
    start = guard + (-(memory.data_ptr() + guard)) % 256
    workspace = memory[start : start + needed]
    want = target.prefill(inputs)
    got = target.prefill(inputs, workspace=workspace)
    same_bits("outputs with the caller's workspace", got, want)
    around = torch.cat([memory[:start], memory[start + needed :]])
    if not bool((around == 0xA5).all()):
        fail("memory around the workspace was written")


@case("B87")
def plans_never_shrink(target: Target) -> None:
    """More tokens or more segments never need less."""
    sizes = [
        planned(target, tokens, segments, target.dtype)
        for tokens, segments in ((1, 1), (4096, 1), (4096, 64), (131072, 64))
    ]
    if sizes != sorted(sizes) or sizes[0] < 0:
        fail(f"workspace bytes must not shrink with the step: {sizes}")


@case("B87")
def nothing_else_is_allocated(target: Target) -> None:
    """On a GPU, a call with its own output and workspace allocates nothing."""
    if target.device.type != "cuda" or not planned(target, 256, 2, target.dtype):
        raise NotHere("needs a GPU and a backend with a workspace")
    inputs = activated([200, 56], dtype=target.dtype, device=target.device)
    workspace = torch.empty(planned(target, 256, 2, target.dtype), dtype=torch.uint8, device=target.device)
    segments = Segments.from_lengths([200, 56], target.device)
    out = torch.empty_like(inputs.v)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        target.prefill(inputs, segments=segments, out=out, workspace=workspace)
        extra = torch.cuda.max_memory_allocated() - before
    if extra:
        fail(f"a warm call with out and workspace allocated {extra} bytes")
