"""Run a command in this process and see what a shell would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from rapidkda.cli import main


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Cli = Callable[..., Done]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """cli("verify", "--quick") -> exit code, stdout, stderr. Any exception but SystemExit is a traceback for a user."""

    def run(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        captured = capsys.readouterr()
        code = exit_.value.code
        return Done(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run
