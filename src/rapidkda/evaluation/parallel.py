"""Several candidates asked at once, each in a process of its own.

Most of the battery's time on a GPU is the host's. A process hands back answers: the caller computes the reference
meanwhile, once, and compares. Speculation is timed and so is left to the caller too, when nothing else runs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from types import TracebackType

import torch

from .answers import Answers
from .battery import Battery
from .candidates import Candidate

_battery: list[Battery] = []  # a worker's own, made once


class Workers:
    """Processes that hold a battery each. A context manager.

    Args:
        battery: makes a worker's battery; must be picklable.
        count: of processes.
    """

    def __init__(self, battery: Callable[[], Battery], count: int):
        threads = max(1, torch.get_num_threads() // count)  # this process's, shared out
        self._pool = ProcessPoolExecutor(count, get_context("spawn"), initializer=_start, initargs=(battery, threads))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=error is None, cancel_futures=True)

    def answers(self, makers: Sequence[Callable[[], Candidate]]) -> Iterator[tuple[int, Answers]]:
        """Ask all of them now; (index, answers) of each as it comes.

        `makers` make the candidates in a worker, from plain values.
        """
        futures = {self._pool.submit(_answer, make): index for index, make in enumerate(makers)}
        return ((futures[future], _result(future)) for future in as_completed(futures))


def _start(battery: Callable[[], Battery], threads: int) -> None:
    torch.set_num_threads(threads)
    _battery.append(battery())


def _answer(make: Callable[[], Candidate]) -> bytes:
    """Pickled here: torch makes a pool's own pickling share tensors, in memory that a container may not have."""
    return pickle.dumps(_battery[0].answer(make()))


def _result(future: Future[bytes]) -> Answers:
    try:
        found: Answers = pickle.loads(future.result())
        return found
    except BrokenExecutor as error:
        return Answers(error=f"its process, or another one, ended: {error}")
