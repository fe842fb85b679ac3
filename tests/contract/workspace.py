"""What a call costs besides its result: scratch memory, declared and sufficient, and time that follows the tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

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
    """Many short sequences in one call cost at most 1.15 times as much as in several calls: nobody scans the table from
    its start.

    The same memory is read and written either way, and on a GPU every call fills the device. Other work on the machine
    only ever adds, so the least of several turns counts, and what looks slow gets more of them.
    """
    # On a CPU no more: states of 32 MB and more are fresh pages in every call, which costs a fifth.
    few, many, length = (512, 4096, 64) if target.device.type == "cuda" else (32, 128, 16)
    inputs = activated([length] * many, dtype=target.dtype, device=target.device)
    parts = [
        Segments.from_lengths([length] * few, target.device, [n * length for n in range(begin, begin + few)])
        for begin in range(0, many, few)
    ]
    tables = {"one call": [inputs.segments], f"{len(parts)} calls": parts}
    least = dict.fromkeys(tables, math.inf)
    for turn in range(20):
        for name, calls in tables.items():
            least[name] = min(least[name], _seconds(target, inputs, calls))
        whole, apart = least.values()
        if turn >= 4 and whole <= 1.15 * apart:
            return
    fail(f"{many} sequences cost {', '.join(f'{seconds:.3g} s in {name}' for name, seconds in least.items())}")


def _seconds(target: Target, inputs: Inputs, tables: Sequence[Segments]) -> float:
    """Of one prefill a table: device time on a GPU, processor time elsewhere, where others may share the processor."""
    out = torch.empty_like(inputs.v)
    if target.device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        target.prefill(inputs, segments=tables[0], out=out)  # keeps the device busy while the host prepares the next
        begin.record()
        for table in tables:
            target.prefill(inputs, segments=table, out=out)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    target.prefill(inputs, segments=tables[0], out=out)  # touches fresh memory
    start = time.process_time()
    for table in tables:
        target.prefill(inputs, segments=table, out=out)
    return time.process_time() - start
