"""`python -m rapidkda.training`: options become settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rapidkda.training import __main__ as commands
from rapidkda.training.loop import Settings, Stage


def test_options_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(commands, "train", lambda settings: seen.append(settings) or {"loss_text": 1.25})
    line = "train --corpus c --out o --minutes 7 --resume r --seed 1 --stages 4096:0.5,16384:1 --batch-tokens 131072"
    done = CliRunner().invoke(commands.app, [*line.split(), "--mixture", "0.6", "0.2", "0.08", "0.12"])
    assert done.exit_code == 0, done.output
    assert "loss_text 1.2500" in done.output
    (settings,) = seen
    assert (settings.corpus, settings.out, settings.resume) == (Path("c"), Path("o"), Path("r"))
    assert list(settings.stages) == [Stage(4096, 0.5), Stage(16384, 1.0)]
    assert settings.mixture == (0.6, 0.2, 0.08, 0.12)
    assert (settings.minutes, settings.batch_tokens, settings.seed) == (7, 131_072, 1)


def test_every_command_has_help() -> None:
    for name in ("corpus", "train", "export"):
        done = CliRunner().invoke(commands.app, [name, "--help"])
        assert done.exit_code == 0
        assert "--out" in done.output
