"""What a backend may cost: the budget, and whether a result is inside it.

The limits on log-probabilities are for the comparison "operator": the rest of the model is the same to the last bit, so
that all of the difference is the backend's. A bfloat16 model's own rounding is larger and no backend's fault; it must
answer as many questions all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from .logprobs import Drift
from .statistics import Estimate

MEAN_ABS = 5e-3  # nats, mean |delta logprob|
KL = 1e-4  # nats a token
SHARE = 0.01  # of the questions, either way


@dataclass(frozen=True, slots=True)
class Verdict:
    """One quantity against its limit."""

    what: str
    value: float
    limit: float

    @property
    def within(self) -> bool:
        return self.value <= self.limit  # NaN is not


def judge_share(task: str, difference: Estimate) -> Verdict:
    """A task's paired difference: at most one point, or one question where a point is less than that.

    The same questions are asked of both, so the difference is that of the questions answered otherwise, and questions
    that both get right or wrong add no noise. The point estimate is judged; its interval stands beside it.
    """
    return Verdict(f"{task}, difference", abs(difference.value), max(SHARE, 1 / max(1, difference.count)) + 1e-12)


def judge_drift(drift: Drift) -> list[Verdict]:
    """Of one kind of step: a fault in verification must not drown in the tokens of the prefill."""
    return [
        Verdict(f"{drift.kind}, mean |delta logprob|", drift.mean_abs.value, MEAN_ABS),
        Verdict(f"{drift.kind}, KL a token", drift.kl.value, KL),
    ]
