"""One small call of every cuda kernel, for compute-sanitizer.

The tools slow kernels down by orders of magnitude: in the time in which they see all of these, a test suite would get
through a few cases. Each case has two heads, sequences of several chunks with ragged tails, an empty one and a padding
row, strong writes among the others, and so few CTAs that each takes several heads one after another: what a run leaves
to the next is in it. Results are held to float64. A line before each case, so that a tool's reports tell their kernel.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from rapidkda import Checkpoints, Segments, ops, reference
from rapidkda.backends.cuda.host import fuse, prefill, steps
from rapidkda.backends.cuda.host.plan import FormName, Neighbour, Plan
from rapidkda.ops import kinds
from rapidkda.testing import Inputs, Shape, make_inputs, relative_error, worst_output_error, worst_state_error

DEVICE = "cuda"
LENGTHS = (150, 33, 0, 17, 100)
PADDING = 3  # the sequence whose slot says so
HEADS, DIM = 2, 128
WORKERS = 2  # multiprocessors that the host believes in
LIMIT = 1e-2  # of outputs and states: what matters here are the accesses
Case = Callable[[], None]


def choose(form: FormName, parts: int = 1) -> None:
    """Makes the planner choose one form, with all neighbours, on few multiprocessors."""

    def all_of(*sizes: Any) -> tuple[tuple[Neighbour, ...], dict[tuple[Neighbour, ...], float]]:
        return tuple([name for name, _ in sizes[5]]), {}

    workers = WORKERS if form == "whole" else 2 * WORKERS
    vars(prefill).update(plan=lambda call, sms: Plan(form, parts, 0.0, ()), multiprocessors=lambda device: workers)
    vars(fuse).update(plan_neighbours=all_of, multiprocessors=lambda device: workers)
    vars(steps).update(multiprocessors=lambda device: WORKERS)
    kinds.forget()  # they hold plans


def hold(what: str, error: float) -> None:
    if not error <= LIMIT:
        raise AssertionError(f"{what}: {error:.2e}")


def some_inputs(regime: str, g_dtype: torch.dtype = torch.bfloat16, lengths: tuple[int, ...] = LENGTHS) -> Inputs:
    shape = Shape("small", lengths, HEADS)
    inputs = make_inputs(
        shape, regime, dtype=torch.bfloat16, device=DEVICE, seed=4, layout="fused", gaps=True, g_dtype=g_dtype
    )
    inputs.beta[5::29] = 9.0  # strong writes
    return inputs


def forms(form: FormName, parts: int, regime: str, g_dtype: torch.dtype) -> None:
    choose(form, parts)
    inputs = some_inputs(regime, g_dtype)
    count = len(LENGTHS)
    slots = torch.arange(count, device=DEVICE)
    slots[PADDING] = -1
    pool, out = inputs.states.clone(), torch.full_like(inputs.v, float("nan"))
    table = Checkpoints.build([(0, 48, 0), (0, 96, 1), (4, 64, 2)], count, torch.device(DEVICE))
    exported = torch.full((3, *pool.shape[1:]), float("nan"), device=DEVICE)
    ops.prefill(
        *inputs.operands(),
        **inputs.options(),
        segments=inputs.segments,
        state=pool,
        slots=slots,
        pad_slot=-1,
        checkpoints=table,
        checkpoint_pool=exported,
        out=out,
        backend="cuda",
    )
    torch.cuda.synchronize()
    kept = [n for n in range(count) if n != PADDING]
    want, state = inputs.expected(kept)
    hold("outputs", worst_output_error(out, want, [inputs.spans[n] for n in kept]))
    hold("states", worst_state_error(pool[kept], state))
    if not bool(exported.isfinite().all()):
        raise AssertionError("checkpoints were not written")


def layer(form: FormName, fused: tuple[Neighbour, ...], lower_bound: float | None, g_dtype: torch.dtype) -> None:
    choose(form)
    generator = torch.Generator(DEVICE).manual_seed(7)
    count, width = sum(LENGTHS), HEADS * DIM

    def normal(*extents: int) -> torch.Tensor:
        return torch.randn(extents, generator=generator, device=DEVICE)

    x, z = normal(count, 3 * width).bfloat16(), normal(count, HEADS, DIM).bfloat16()
    g, beta = normal(count, HEADS, DIM).to(g_dtype), normal(count, HEADS).bfloat16()
    weight, norm_weight, A_log, bias = normal(3 * width, 4), normal(DIM), normal(HEADS), normal(width)
    pool, histories = 0.1 * normal(len(LENGTHS), HEADS, DIM, DIM), normal(len(LENGTHS), 3, 3 * width).bfloat16()
    states, before = pool.clone(), histories.clone()
    options: dict[str, Any] = {}
    if "conv" in fused:
        options |= {"conv_weight": weight, "conv_state": histories, "channels_last": True}
    if "norm" in fused:
        options |= {"z": z, "norm_weight": norm_weight}
    segments = Segments.from_lengths(LENGTHS, DEVICE)
    out = ops.prefill_layer(
        x,
        g,
        beta,
        segments=segments,
        state=pool,
        slots=torch.arange(len(LENGTHS), device=DEVICE),
        A_log=A_log,
        dt_bias=bias,
        lower_bound=lower_bound,
        backend="cuda",
        **options,
    )
    torch.cuda.synchronize()
    first = 0
    for n, length in enumerate(LENGTHS):
        rows = slice(first, first + length)
        first += length
        mixed = x[rows].cpu()
        if "conv" in fused:
            mixed = reference.causal_conv(mixed, weight.cpu(), history=before[n].cpu())[0]
        q, k, v = (part.unflatten(1, (HEADS, DIM)) for part in mixed.double().chunk(3, 1))
        want, state = reference.recurrence(
            reference.l2_normalize(q),
            reference.l2_normalize(k),
            v,
            reference.gate_log_decay(g[rows].cpu(), A_log.cpu(), bias.cpu(), lower_bound),
            beta[rows].cpu().double().sigmoid(),
            DIM**-0.5,
            states[n].cpu().transpose(-1, -2),
        )
        if "norm" in fused:
            want = reference.gated_rms_norm(want, z[rows].cpu(), norm_weight.cpu(), 1e-5, "sigmoid")
        if length:
            hold(f"outputs {n}", relative_error(out[rows].cpu(), want))
        hold(f"state {n}", relative_error(pool[n].cpu(), state.transpose(-1, -2)))


def replay(length: int, state_dtype: torch.dtype) -> None:
    """Verifications of as many tokens as the records have positions, each with some of the last one's accepted."""
    choose("whole")
    accepted = (0, length, length // 2, 1)
    inputs = some_inputs("slow", lengths=(2 * length,) * len(accepted))
    count = len(accepted)
    pool = inputs.states.clone().to(state_dtype)
    records = torch.zeros(count, length, HEADS, 3 * DIM, device=DEVICE)
    slots = torch.arange(count, device=DEVICE)
    firsts = torch.tensor([first for first, _ in inputs.spans])
    left = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    for start in (torch.zeros(count, dtype=torch.int64), torch.tensor(accepted)):
        segments = Segments.from_lengths([length] * count, DEVICE, (firsts + start).tolist())
        out = ops.verify(
            *inputs.operands(),
            **inputs.options(),
            segments=segments,
            state=pool,
            slots=slots,
            accepted=left,
            records=records,
            backend="cuda",
        )
        left = torch.tensor(accepted, dtype=torch.int32, device=DEVICE)
    ops.commit(state=pool, records=records, held=None, slots=slots, accepted=left, backend="cuda")
    torch.cuda.synchronize()
    want, _ = inputs.expected()
    spans = [(int(first) + more, length) for first, more in zip(firsts, accepted, strict=True)]
    hold("outputs", worst_output_error(out, want, spans))
    if not bool(pool.isfinite().all()):
        raise AssertionError("states are not finite")


def deferred(length: int, positions: int, state_dtype: torch.dtype) -> None:
    """Verifications in a row whose states stay as they are until the records are full."""
    choose("whole")
    steps_taken = positions // length + 2
    accepted = (length, max(length // 2, 1), 1)
    count = len(accepted)
    inputs = some_inputs("slow", lengths=(steps_taken * length,) * count)
    pool = inputs.states.clone().to(state_dtype)
    records = torch.full((count, positions, HEADS, 3 * DIM), float("nan"), device=DEVICE)
    held = torch.full((count, HEADS), 77, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(count, device=DEVICE)
    firsts = torch.tensor([first for first, _ in inputs.spans])
    left = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(inputs.v, float("nan"))
    for step in range(steps_taken):
        start = firsts + step * torch.tensor(accepted)
        out = ops.verify(
            *inputs.operands(),
            **inputs.options(),
            segments=Segments.from_lengths([length] * count, DEVICE, start.tolist()),
            state=pool,
            slots=slots,
            accepted=left,
            records=records,
            held=held,
            out=out,
            backend="cuda",
        )
        left = torch.tensor(accepted, dtype=torch.int32, device=DEVICE)
    ops.commit(state=pool, records=records, held=held, slots=slots, accepted=left, backend="cuda")
    torch.cuda.synchronize()
    want, _ = inputs.expected()
    spans = [(int(first), (steps_taken - 1) * n + length) for first, n in zip(firsts, accepted, strict=True)]
    hold("outputs", worst_output_error(out, want, spans))
    if not bool(pool.isfinite().all()):
        raise AssertionError("states are not finite")


def cases() -> Iterator[tuple[str, Case]]:
    gates = {"bounded": -5.0, "unbounded": None}
    dtypes = {"g16": torch.bfloat16, "g32": torch.float32}
    every: list[tuple[FormName, int]] = [("whole", 1), ("pair", 1), ("parallel", 2), ("parallel", 3)]
    for (form, parts), gate, (name, dtype) in itertools.product(every, gates, dtypes.items()):
        regime = "unbounded" if gate == "unbounded" else "fast" if parts == 2 else "slow"
        yield f"{form}{parts}-{gate}-{name}", partial(forms, form, parts, regime, dtype)
    neighbours: list[tuple[FormName, tuple[Neighbour, ...]]] = [
        ("whole", ("conv",)),
        ("whole", ("norm",)),
        ("whole", ("conv", "norm")),
        ("pair", ("conv",)),
    ]
    for (form, fused), gate, (name, dtype) in itertools.product(neighbours, gates, dtypes.items()):
        if form == "whole" or name == "g16":
            yield f"{form}-{'-'.join(fused)}-{gate}-{name}", partial(layer, form, fused, gates[gate], dtype)
    for length, dtype in itertools.product((2, 4, 8, 17), (torch.float32, torch.bfloat16)):  # each kernel
        yield f"replay{length}-{str(dtype).removeprefix('torch.')}", partial(replay, length, dtype)
    for (length, positions), dtype in itertools.product(
        ((2, 8), (2, 16), (2, 24), (4, 8), (4, 16), (4, 24), (8, 8), (8, 16), (8, 24), (11, 30)),
        (torch.float32, torch.bfloat16),
    ):
        name = f"deferred{length}-{positions}-{str(dtype).removeprefix('torch.')}"
        yield name, partial(deferred, length, positions, dtype)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="cases whose name has such a word")
    parser.add_argument("--skip", action="append", default=[], metavar="WORD", help="all but these")
    chosen = parser.parse_args(arguments)
    failed = 0
    for name, case in cases():
        if any(word in name for word in chosen.skip) or (chosen.only and not any(word in name for word in chosen.only)):
            continue
        say(f"{name} ...")
        begin = time.perf_counter()
        try:
            case()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed += 1
        say(f"{time.perf_counter() - begin:.1f} s")
    say(f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
