"""What a call costs besides its result: scratch memory, declared and sufficient, and time that follows the tokens."""

from __future__ import annotations

import time

import torch

from rapidkda import Segments, Sizes
from rapidkda.testing import Inputs, activated

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


@case("B94", slow_when_interpreted=True)
def many_sequences_cost_no_more_a_token(target: Target) -> None:
    """A token of 256 short sequences costs at most 1.15 times a token of 8: nobody scans the table from its start."""
    gpu = target.device.type == "cuda"
    length = 1024 if gpu else 64
    per_token = {}
    for count in (8, 256):
        inputs = activated([length] * count, dtype=target.dtype, device=target.device)
        target.prefill(inputs)
        per_token[count] = min(_seconds(target, inputs) for _ in range(3)) / (length * count)
    if per_token[256] > 1.15 * per_token[8]:
        fail(f"a token costs {per_token[8]:.3g} s among 8 sequences, {per_token[256]:.3g} s among 256")


def _seconds(target: Target, inputs: Inputs) -> float:
    """Of one prefill: device time on a GPU, processor time elsewhere, where others may share the processor."""
    if target.device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.prefill(inputs)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    start = time.process_time()
    target.prefill(inputs)
    return time.process_time() - start
