"""What a model says with a choice of backends, before it is compared with anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from .generation import Tokens
from .scoring import Scored
from .tasks import Task


@dataclass(slots=True, eq=False)
class Answers:
    """Everything that is asked of a candidate, as far as it got: host values, so that a process can hand them on.

    Attributes:
        backends: of each operator, as the engine chose them.
        scored: the passages of text.
        outcomes: of each task's questions, in order.
        continuations: of each prompt.
        error: what ended it early, or None.
        seconds: that it took.
    """

    backends: dict[str, str] = field(default_factory=dict)
    scored: list[Scored] = field(default_factory=list)
    outcomes: dict[Task, list[bool]] = field(default_factory=dict)
    continuations: list[Tokens] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
