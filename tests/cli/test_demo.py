"""`rapidkda demo` on a short text: it shows what it promises, and fails where the two models disagree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rapidkda import ops
from rapidkda.cli import demo

from .conftest import Cli

pytest.importorskip("transformers")
SHORT = ("--tokens", "90", "--chunk", "40", "--new-tokens", "4")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_shipped_text_is_there() -> None:
    assert demo.TEXT.read_text("ascii").startswith("The Constitution of the United States of America")
    assert "Public\ndomain" in (demo.TEXT.parent / "README.md").read_text()


def test_table(cli: Cli) -> None:
    done = cli("demo", *SHORT)
    assert done.code == 0, done.out + done.err
    for shown in (
        "90 bytes of us-constitution.txt in chunks of 40",
        "prefill backend: torch (first in auto's order that can run here)",
        "decode backend: torch",
        "passed over: triton: ",
        "prefill tokens/s",
        "untouched transformers",
        "rapidkda engine",
        "within the limit of 1e-04",
        "the first 4 of 4 are the same",
        "the United States of America",
    ):
        assert shown in done.out, shown


def test_own_text(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("Kimi Delta Attention, " * 4)
    done = cli("demo", "--text", str(path), "--new-tokens", "2")
    assert done.code == 0
    assert "88 bytes of own.txt" in done.out


def test_fails_where_the_models_disagree(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.gated_rms_norm
    monkeypatch.setattr(ops, "gated_rms_norm", lambda *args, **options: right(*args, **options).mul_(1.01))
    done = cli("demo", *SHORT)
    assert done.code == 1
    assert "ABOVE the limit" in done.out
