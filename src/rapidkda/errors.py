"""Public exceptions.

Two kinds of failure, kept apart everywhere:

* the caller is wrong: `ValueError` or `TypeError` whose message names the argument, what it got and what it
  takes (raised by `rapidkda.checks` before any backend is touched);
* a backend cannot serve a call here: it says so with reasons, and asking for it by name raises
  `BackendUnavailable`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class BackendUnavailable(RuntimeError):
    """A backend was asked for by name, or every backend was tried, and none can run here.

    `reasons` maps each backend that was considered to all of its unmet requirements.
    """

    def __init__(self, summary: str, reasons: Mapping[str, Sequence[str]]):
        self.reasons = {name: tuple(unmet) for name, unmet in reasons.items()}
        lines = [f"  {name}: {reason}" for name, unmet in self.reasons.items() for reason in unmet]
        super().__init__("\n".join([summary, *lines]))


class ConfigConflict(ValueError):
    """Two configuration sources ask for different things. Names both."""


class CompilationError(RuntimeError):
    """A kernel did not compile. The message carries the compiler's log."""
