"""Answers from other processes, and a process that dies."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from rapidkda.evaluation.answers import Answers
from rapidkda.evaluation.parallel import Workers
from rapidkda.evaluation.scoring import Scored


class Stub:
    """In the place of a battery: its candidates are strings."""

    def answer(self, candidate: Any) -> Answers:
        if candidate == "dies":
            os._exit(1)
        scored = Scored(torch.arange(6.0).view(2, 3), torch.tensor([2, 0]), ("verify",))
        return Answers({"prefill": candidate}, [scored])


def test_answers_come_whole_and_a_death_is_told() -> None:
    makers: list[Any] = [partial(str, name) for name in ("first", "second", "dies", "too late")]
    with Workers(Stub, 1) as workers:  # type: ignore[arg-type]
        found = dict(workers.answers(makers))
    assert [found[index].backends for index in range(2)] == [{"prefill": "first"}, {"prefill": "second"}]
    (scored,) = found[1].scored
    assert torch.equal(scored.logprobs, torch.arange(6.0).view(2, 3))
    assert scored.right().tolist() == [True, False]
    assert found[0].error is None
    for index in (2, 3):
        assert str(found[index].error).startswith("its process, or another one, ended: ")
