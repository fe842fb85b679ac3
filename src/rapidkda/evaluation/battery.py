"""The battery: every candidate on the same held-out tasks and texts, against the torch backend in float32."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..dispatch import load
from ..engine import MtpHead
from ..serving import BackendWish
from . import generation, logprobs, tasks
from .answers import Answers
from .budget import Verdict, judge_drift, judge_share
from .candidates import REFERENCE, Candidate
from .decay import HalfLives, half_lives, record
from .generation import Agreement, Speculation
from .logprobs import Drift, Spans
from .scoring import Scorer
from .statistics import Estimate, paired_difference, share
from .tasks import TASKS, Exam, Question, Task

REFERENCE_CHUNK = 4096  # tokens; attention over longer pieces takes much memory
DTYPES = {"operator": torch.float32, "model": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything.

    Attributes:
        chunk: tokens of a prefill chunk; no multiple of the kernels' chunks, so that tails occur.
        passages, spans: texts for log-probabilities, and how each is fed.
        needle_lengths, needle_texts: tokens of the needle texts, and how many of each length.
        problems: of arithmetic.
        prompts, prompt_tokens, new_tokens: greedy continuations, and speculation; no prompts for neither.
        decay_tokens: of the text whose decays are averaged.
    """

    chunk: int
    passages: int
    spans: Spans
    needle_lengths: tuple[int, ...]
    needle_texts: int
    problems: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    decay_tokens: int


FULL = Sizes(1000, 6, Spans(3920, 56, 119), (512, 1024, 2048, 4096, 8192, 16384), 2, 200, 8, 512, 96, 8192)
QUICK = Sizes(200, 2, Spans(400, 32, 48), (512, 1024), 1, 24, 2, 128, 24, 1024)


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """The model to judge with.

    Attributes:
        load: the model in a dtype, in evaluation mode.
        head: its MTP head in a dtype with backends, or None.
    """

    load: Callable[[torch.dtype], Any]
    head: Callable[[torch.dtype, BackendWish], MtpHead] | None = None


@dataclass(slots=True)
class TaskResult:
    """One task.

    Attributes:
        right: share of right answers.
        difference: to the reference's on the same questions.
        outcomes: "1" or "0" for each question, in the order of `Report.questions`.
    """

    right: Estimate
    difference: Estimate
    outcomes: str


@dataclass(slots=True)
class Judged:
    """What was found of one candidate.

    Attributes:
        name, comparison: of the candidate.
        backends: of each operator, as the engine chose them.
        drifts: of log-probabilities, all tokens first.
        tasks: by task.
        agreement: of greedy continuations.
        speculation: by number of drafts.
        verdicts: on the budget.
        error: what ended it early, or None.
        seconds: that its answers and its speculation took.
    """

    name: str
    comparison: str
    backends: dict[str, str] = field(default_factory=dict)
    drifts: list[Drift] = field(default_factory=list)
    tasks: dict[Task, TaskResult] = field(default_factory=dict)
    agreement: Agreement | None = None
    speculation: list[Speculation] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0

    @property
    def within(self) -> bool:
        """It ran to its end inside its budget."""
        return self.error is None and all(verdict.within for verdict in self.verdicts)


@dataclass(slots=True)
class Report:
    """The whole battery.

    Attributes:
        sizes: what was run.
        questions: of the tasks, with length and depth.
        reference: share of right answers of the reference, by task.
        reference_outcomes: as `TaskResult.outcomes`.
        half_lives: of every head.
        judged: one entry a candidate.
    """

    sizes: Sizes
    questions: dict[Task, list[Question]]
    reference: dict[Task, Estimate]
    reference_outcomes: dict[Task, str]
    half_lives: list[HalfLives]
    judged: list[Judged]

    @property
    def within(self) -> bool:
        return all(one.within for one in self.judged)


class Battery:
    """Judges candidates one by one; the reference's answers are computed once.

    Args:
        models: to judge with.
        sizes: how much of everything.
        drafts: numbers of draft tokens to speculate with, 0 first.
    """

    def __init__(self, models: Models, sizes: Sizes, drafts: Sequence[int] = (0, 1, 3)):
        self.models = models
        self.sizes = sizes
        self.drafts = tuple(drafts)
        self.exams: dict[Task, Exam] = {
            "needles": tasks.needles(sizes.needle_lengths, sizes.needle_texts),
            "arithmetic": tasks.arithmetic(sizes.problems),
        }
        self._loaded: dict[torch.dtype, Any] = {}

    def run(
        self,
        candidates: Sequence[Candidate],
        answers: Iterable[tuple[int, Answers]] | None = None,
        *,
        tell: Callable[[str], None] = lambda line: None,
        keep: Callable[[Report], None] = lambda report: None,
    ) -> Report:
        """Judge every candidate; one that fails does not keep the others from their turn.

        Speculation follows when all are judged, in models as they are served: for the candidates of the comparison
        "model", or for all where there are none.

        Args:
            candidates: to judge.
            answers: (index, result of `answer`) of each of them in any order, from elsewhere
                (`rapidkda.evaluation.parallel`).
            tell: hears what is done next.
            keep: is called with what there is after each result.
        """
        tell("reference: torch in float32")
        report = self._report()
        results: dict[int, Judged] = {}
        for index, answered in answers or enumerate(map(self.answer, candidates)):
            found = results[index] = self.compare(candidates[index], answered)
            report.judged = [results[one] for one in sorted(results)]
            tell(f"{found.name}, {found.comparison}: judged in {found.seconds:.0f} s")
            keep(report)
        served = [pair for pair in zip(candidates, report.judged) if pair[0].comparison == "model"]
        if self.models.head is not None and self.sizes.prompts:
            for candidate, found in served or zip(candidates, report.judged):
                if found.error is None:
                    tell(f"{found.name}, {found.comparison}: speculation")
                    self.speculate(candidate, found)
                    keep(report)
        return report

    def _report(self) -> Report:
        return Report(
            sizes=self.sizes,
            questions={task: list(exam.questions) for task, exam in self.exams.items()},
            reference={task: share(outcomes) for task, outcomes in self._reference.outcomes.items()},
            reference_outcomes={task: _digits(outcomes) for task, outcomes in self._reference.outcomes.items()},
            half_lives=self._half_lives(),
            judged=[],
        )

    def judge(self, candidate: Candidate) -> Judged:
        """Everything but speculation of one candidate."""
        return self.compare(candidate, self.answer(candidate))

    def answer(self, candidate: Candidate) -> Answers:
        """What a candidate says, which needs no reference. What it raises is its result."""
        found = Answers()
        with _watched(found):
            model = self._model(DTYPES[candidate.comparison])
            with candidate.installed() as backends:
                most = max(self.sizes.passages, *(len(exam.samples) for exam in self.exams.values()))
                scorer = Scorer(model, backends, chunk=self.sizes.chunk, max_passages=most)
                self._ask(found, model, backends, scorer)
        return found

    def compare(self, candidate: Candidate, answers: Answers) -> Judged:
        """A candidate's answers, as far as it got, against the reference's."""
        found = Judged(candidate.name, candidate.comparison, answers.backends)
        found.error, found.seconds = answers.error, answers.seconds
        if answers.scored:
            found.drifts = logprobs.drifts(answers.scored, self._reference.scored)
        for task, outcomes in answers.outcomes.items():
            difference = paired_difference(outcomes, self._reference.outcomes[task])
            found.tasks[task] = TaskResult(share(outcomes), difference, _digits(outcomes))
        if answers.error is None:
            found.verdicts = self._verdicts(found)
        if answers.continuations:
            found.agreement = generation.agreement(answers.continuations, self._reference.continuations)
        return found

    def speculate(self, candidate: Candidate, found: Judged) -> None:
        """Add speculation to a candidate's results. It is timed: nothing else should run."""
        head, dtype = self.models.head, DTYPES[candidate.comparison]
        if head is None:
            raise ValueError("models must have a head to speculate with, got None")
        with _watched(found), candidate.installed() as backends:
            found.speculation = generation.speculation(
                self._model(dtype),
                head(dtype, backends),
                backends,
                self._prompts,
                self.sizes.new_tokens,
                chunk=self.sizes.chunk,
                counts=self.drafts,
            )

    def _ask(self, found: Answers, model: Any, backends: BackendWish, scorer: Scorer, *, whole: bool = False) -> None:
        """Fill in the answers; `whole` prefills every text to its end."""
        chosen = scorer.model.first_layer.choices
        found.backends = {op: choice.backend.name for op, choice in chosen.items()}
        found.scored = logprobs.score_text(scorer, self.sizes.passages, self.sizes.spans, whole)
        for task in TASKS:
            found.outcomes[task] = tasks.sit(scorer, self.exams[task], stepwise=not whole)
        if self.sizes.prompts:
            results, _ = generation.continue_all(
                model, backends, self._prompts, self.sizes.new_tokens, chunk=self.sizes.chunk
            )
            found.continuations = [result.tokens for result in results]

    def _verdicts(self, found: Judged) -> list[Verdict]:
        verdicts = [judge_share(task, one.difference) for task, one in found.tasks.items()]
        if found.comparison == "operator":
            for drift in found.drifts:
                verdicts += judge_drift(drift)
        return verdicts

    def _model(self, dtype: torch.dtype) -> Any:
        if dtype not in self._loaded:
            self._loaded[dtype] = self.models.load(dtype)
        return self._loaded[dtype]

    @property
    def _prompts(self) -> list[generation.Tokens]:
        return generation.text_prompts(self.sizes.prompts, self.sizes.prompt_tokens)

    @cached_property
    def _reference(self) -> Answers:
        model, found = self._model(torch.float32), Answers()
        scorer = Scorer(model, REFERENCE, chunk=REFERENCE_CHUNK, max_tokens=REFERENCE_CHUNK, max_passages=16)
        self._ask(found, model, REFERENCE, scorer, whole=True)
        return found

    def _half_lives(self) -> list[HalfLives]:
        (text,) = generation.text_prompts(1, self.sizes.decay_tokens)
        return half_lives(record(self._model(torch.float32), load("torch"), text))


@contextmanager
def _watched(found: Answers | Judged) -> Iterator[None]:
    """Take the time, and an exception as a result: a backend may fail in any way, and the next one has its turn."""
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        found.error = f"{type(error).__name__}: {error}"
    found.seconds += time.perf_counter() - start


def _digits(outcomes: Sequence[bool]) -> str:
    return "".join("1" if right else "0" for right in outcomes)
