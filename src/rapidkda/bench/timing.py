"""How a call is timed: CUDA graph replays by device events on a GPU, the wall clock on a CPU."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

Call = Callable[[], None]

# The least that a timed graph takes. The start of one is 2 us, and its launch on the host more; engines pay that once
# for a whole model, not for every operator.
GRAPH_US = 500.0


@dataclass(frozen=True)
class Settings:
    """Median of `rounds` rounds of `replays` replays each, after `warmup` replays."""

    rounds: int = 5
    replays: int = 10
    warmup: int = 3


@dataclass(frozen=True)
class Times:
    """Microseconds of one call."""

    us: float
    us_min: float
    us_max: float

    @staticmethod
    def of(samples: Sequence[float]) -> Times:
        return Times(*(round(f(samples), 3) for f in (statistics.median, min, max)))


def device_times(calls: Sequence[Call], device: torch.device, settings: Settings) -> tuple[Times, list[Call]]:
    """Time calls that do the same work on different inputs, in rotation. Returns the times, and each call as a graph of
    its own. Where these are short, one graph of several rotations is timed instead."""
    if device.type != "cuda":
        return _wall_times(calls, settings), list(calls)
    replays = [graphed(call) for call in calls]
    for i in range(settings.warmup * len(replays)):
        replays[i % len(replays)]()
    timed, each = replays, 1
    us = _replayed(replays, device, settings.replays)
    if us < GRAPH_US:
        rotations = math.ceil(GRAPH_US / max(1.0, us) / len(calls))

        def several() -> None:
            for call in list(calls) * rotations:
                call()

        timed, each = [graphed(several)], rotations * len(calls)
        for _ in range(settings.warmup):
            timed[0]()
    return Times.of([_replayed(timed, device, settings.replays) / each for _ in range(settings.rounds)]), replays


def _replayed(graphs: Sequence[Call], device: torch.device, replays: int) -> float:
    """Microseconds of one replay, the graphs in rotation."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for i in range(replays):
        graphs[i % len(graphs)]()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) * 1e3 / replays


def graphed(call: Call) -> Call:
    """The call captured in a CUDA graph, after two eager runs that compile, tune and allocate."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _wall_times(calls: Sequence[Call], settings: Settings) -> Times:
    samples = []
    calls[0]()
    for i in range(settings.rounds):
        start = time.perf_counter()
        calls[i % len(calls)]()
        samples.append((time.perf_counter() - start) * 1e6)
    return Times.of(samples)


def host_time(call: Call, device: torch.device, calls: int = 30, rounds: int = 5) -> float | None:
    """Microseconds that the host spends on one eager call while the device works; None on a CPU.

    The median call of the quietest round: other work on the machine only ever adds, so the processes that this one has
    started (references are computed meanwhile) are stopped for as long. Few enough calls a round that the device's
    queue never fills, which would make the host wait for it.
    """
    if device.type != "cuda":
        return None
    medians = []
    with children_stopped():
        for _ in range(3):
            call()
        for _ in range(rounds):
            torch.cuda.synchronize(device)
            marks = [time.perf_counter_ns()]
            for _ in range(calls):
                call()
                marks.append(time.perf_counter_ns())
            medians.append(statistics.median(after - before for before, after in itertools.pairwise(marks)) / 1e3)
        torch.cuda.synchronize(device)
    return round(min(medians), 1)


@contextmanager
def children_stopped() -> Iterator[None]:
    """Stop the processes that this one has started, and let them go on afterwards, where the system can."""
    stopped: list[int] = []
    try:
        for child in multiprocessing.active_children() if hasattr(signal, "SIGSTOP") else ():
            if child.pid is not None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(child.pid, signal.SIGSTOP)
                    stopped.append(child.pid)
        yield
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def launches(call: Call, device: torch.device) -> int | None:
    """Kernels (copies and fills too) that one eager call launches; None where the profiler sees no device events."""
    if device.type != "cuda":
        return None
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize(device)
    count = sum(1 for event in recorded.events() or () if event.device_type == DeviceType.CUDA)
    return count or None


def copy_bandwidth(device: torch.device, gigabytes: float = 2.0, rounds: int = 5, copies: int = 10) -> float | None:
    """Bytes read plus bytes written a second of a large device copy, in TB/s; None on a CPU.

    Eager copies: recorded in a CUDA graph the same copy is a memcpy node, which reaches two thirds of the rate.
    """
    if device.type != "cuda":
        return None
    source = torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    rates: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(copies):
            target.copy_(source)
        end.record()
        torch.cuda.synchronize(device)
        rates.append(2 * source.numel() * copies / begin.elapsed_time(end) / 1e9)
    return statistics.median(rates)
