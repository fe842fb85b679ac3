"""How the host is timed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from rapidkda.bench import timing


def state(pid: int) -> str:
    """R, S, D: it goes on; T: it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the Linux process table")
def test_children_are_stopped_and_go_on() -> None:
    child = get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    assert child.pid is not None
    try:
        with timing.children_stopped():
            until = time.monotonic() + 5
            while state(child.pid) != "T" and time.monotonic() < until:
                time.sleep(0.01)
            assert state(child.pid) == "T"
        assert state(child.pid) != "T"
    finally:
        child.kill()
        child.join()


def test_a_cpu_has_no_host_time() -> None:
    assert timing.host_time(lambda: None, torch.device("cpu")) is None


def test_host_time_is_that_of_the_median_call_of_the_quietest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    durations = iter([9] * 3 + [2, 2, 50] + [3, 1, 70] + [7, 7, 7])  # microseconds; three calls come before

    def call() -> None:
        nonlocal now
        now += next(durations) * 1000

    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert timing.host_time(call, torch.device("cuda"), calls=3, rounds=3) == 2.0


class Clock:
    """A device on which a graph takes 2 us to start; it stands in for events and graphs."""

    now = 0.0

    def event(self, enable_timing: bool) -> Clock.Event:
        return Clock.Event(self)

    def graphed(self, call: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.now += 2.0
            call()

        return replay

    class Event:
        def __init__(self, clock: Clock):
            self.clock = clock

        def record(self) -> None:
            self.us = self.clock.now

        def elapsed_time(self, end: Clock.Event) -> float:
            return (end.us - self.us) / 1e3


@pytest.mark.parametrize("us", [1.0, 5.0, 70.0, 499.0, 800.0])
def test_short_calls_share_a_graph(monkeypatch: pytest.MonkeyPatch, us: float) -> None:
    clock, ran = Clock(), Counter[int]()

    def call(index: int) -> Callable[[], None]:
        def run() -> None:
            clock.now += us
            ran[index] += 1

        return run

    monkeypatch.setattr(timing, "graphed", clock.graphed)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    settings = timing.Settings(rounds=3, replays=9)
    times, replays = timing.device_times([call(i) for i in range(3)], torch.device("cuda"), settings)
    assert times.us == pytest.approx(us, rel=0.02)
    assert len(set(ran.values())) == 1, "every input has as many turns"
    for i, replay in enumerate(replays):
        before = ran.copy()
        replay()
        assert ran - before == Counter([i]), "what is checked is one call"
