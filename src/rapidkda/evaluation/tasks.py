"""Needle recall and arithmetic on held-out problems.

An answer counts as right when each of its tokens is the most likely one after the right tokens before it: which is when
greedy decoding, asked this question, gives exactly this answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..training import tasks
from .scoring import MIXED, Passage, Scorer

Task = Literal["needles", "arithmetic"]
TASKS: tuple[Task, ...] = ("needles", "arithmetic")


@dataclass(frozen=True, slots=True)
class Question:
    """One answer that is asked for.

    Attributes:
        task: needles or arithmetic.
        length: tokens of its text.
        depth: where its evidence stands, 0 (first) to 1 (last); 0 for arithmetic.
    """

    task: Task
    length: int
    depth: float


@dataclass(frozen=True, slots=True, eq=False)
class Exam:
    """Texts with questions in them, in order.

    Attributes:
        samples: the texts.
        questions: those of all samples.
    """

    samples: tuple[tasks.Sample, ...]
    questions: tuple[Question, ...]


def needles(lengths: Sequence[int], texts: int, seed: int = 0) -> Exam:
    """`texts` held-out texts of each length with 36 needles, or as many as it holds; each is asked for."""
    return _exam(
        "needles",
        [
            tasks.needles(seed + n, "test", length=length, count=min(tasks.NEEDLES, tasks.most_needles(length)))
            for length in lengths
            for n in range(texts)
        ],
    )


def arithmetic(problems: int, seed: int = 0) -> Exam:
    """Held-out problems; the worked steps and the final answer must be right."""
    return _exam("arithmetic", [tasks.arithmetic(seed + n, "test") for n in range(problems)])


def _exam(task: Task, samples: Sequence[tasks.Sample]) -> Exam:
    questions = [Question(task, len(sample.text), answer.depth) for sample in samples for answer in sample.answers]
    return Exam(tuple(samples), tuple(questions))


def sit(scorer: Scorer, exam: Exam, *, stepwise: bool = True) -> list[bool]:
    """Whether each question is answered right, in order.

    Args:
        stepwise: the last third of a text's answers, or its only one, goes in decode and verify steps; else all of it
            is prefilled.
    """
    scored = scorer.score([_passage(sample, stepwise) for sample in exam.samples])
    outcomes: list[bool] = []
    for sample, one in zip(exam.samples, scored):
        right = one.right().tolist()
        for answer in sample.answers:
            count = answer.end - answer.start
            outcomes.append(all(right[:count]))
            right = right[count:]
    return outcomes


def _passage(sample: tasks.Sample, stepwise: bool) -> Passage:
    tokens = tuple(sample.tokens)
    scored = tuple(position - 1 for answer in sample.answers for position in range(answer.start, answer.end))
    first = sample.answers[2 * len(sample.answers) // 3]
    return Passage(tokens, first.start if stepwise else len(tokens), MIXED, scored)
