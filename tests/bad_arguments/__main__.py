"""Judge every bad call without a test runner."""

from __future__ import annotations

import sys

import torch

from . import CALLS, GOOD, problem_with


def main() -> int:
    torch.set_num_threads(1)
    for op, (function, good) in GOOD.items():
        try:
            function(**good())
        except Exception as error:
            print(f"{op}: the good call fails: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
            return 1
    wrong = {call.id: problem for call in CALLS if (problem := problem_with(call))}
    for name, problem in wrong.items():
        print(f"{name}: {problem}", file=sys.stderr)  # noqa: T201
    print(f"{len(CALLS) - len(wrong)} of {len(CALLS)} bad calls refused")  # noqa: T201
    return 1 if wrong else 0


raise SystemExit(main())
