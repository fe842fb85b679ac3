"""Several candidates judged at once, each in a process of its own.

Most of the battery's time on a GPU is the host's, so that processes share the GPU well. Speculation is timed and so is
left to the caller, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from types import TracebackType

from .battery import Battery, Judged
from .candidates import Candidate

_battery: list[Battery] = []  # a worker's own, made once


class Workers:
    """Processes that hold a battery each. A context manager.

    Args:
        battery: makes a worker's battery; must be picklable.
        count: of processes.
    """

    def __init__(self, battery: Callable[[], Battery], count: int):
        self._pool = ProcessPoolExecutor(count, get_context("spawn"), initializer=_start, initargs=(battery,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=error is None, cancel_futures=True)

    def judge(
        self, candidates: Sequence[Candidate], makers: Sequence[Callable[[], Candidate]]
    ) -> Iterator[tuple[int, Judged]]:
        """Start on all of them now; (index, result) of each as it comes.

        `makers` make the candidates again in a worker, from plain values.
        """
        futures = {self._pool.submit(_judge, make): index for index, make in enumerate(makers)}
        return ((futures[future], _result(candidates[futures[future]], future)) for future in as_completed(futures))


def _start(battery: Callable[[], Battery]) -> None:
    _battery.append(battery())


def _judge(make: Callable[[], Candidate]) -> Judged:
    return _battery[0].judge(make())


def _result(candidate: Candidate, future: Future[Judged]) -> Judged:
    try:
        return future.result()
    except BrokenExecutor as error:
        return Judged(candidate.name, candidate.comparison, error=f"its process, or another one, ended: {error}")
