"""How the host is timed."""

from __future__ import annotations

import time
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
