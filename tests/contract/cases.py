"""The registry of checks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CheckFunction = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """One check with its parameters; `run(target)` raises AssertionError where the backend is wrong."""

    id: str
    run: functools.partial[None]
    slow_when_interpreted: bool

    @property
    def values(self) -> set[tuple[CheckFunction, str, str]]:
        """The check, and every value that its parameters have."""
        check = self.run.func
        return {(check, "", "")} | {(check, name, _label(value)) for name, value in self.run.keywords.items()}


CASES: dict[str, Case] = {}


def case(
    *kinds: str, slow_when_interpreted: bool = False, **parameters: Sequence[Any]
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check under the kinds of faults it covers, once for every combination of its parameters."""

    def register(check: CheckFunction) -> CheckFunction:
        prefix = "-".join([*kinds, check.__name__])
        for values in itertools.product(*parameters.values()):
            chosen = dict(zip(parameters, values, strict=True))
            label = ",".join(f"{name}={_label(value)}" for name, value in chosen.items())
            name = f"{prefix}[{label}]" if label else prefix
            CASES[name] = Case(name, functools.partial(check, **chosen), slow_when_interpreted)
        return check

    return register


def every_value() -> list[str]:
    """Ids of fewer cases: every check, and every value of each of its parameters, but not every combination."""
    left = set().union(*(case.values for case in CASES.values() if not case.slow_when_interpreted))
    chosen = []
    while left:
        best = max(CASES.values(), key=lambda case: 0 if case.slow_when_interpreted else len(case.values & left))
        chosen.append(best.id)
        left -= best.values
    return [name for name in CASES if name in chosen]


def matching(*prefixes: str) -> list[Case]:
    """Cases whose id starts with one of the prefixes, or holds it as a kind; each prefix must match something."""
    found = []
    for prefix in prefixes:
        hits = [c for c in CASES.values() if c.id.startswith(prefix) or prefix in c.id.split("[")[0].split("-")]
        if not hits:
            raise LookupError(f"no contract case matches {prefix!r}")
        found += [hit for hit in hits if hit not in found]
    return found


def _label(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "+".join(map(_label, value))
    return str(value).removeprefix("torch.")
