"""Recorded runs of the battery: of the weights that ship, inside the budget, and shown on the page as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapidkda.engine.loading import SHIPPED
from rapidkda.evaluation.markdown import markdown
from rapidkda.evaluation.result_file import load, weights_digest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("benchmarks/results/*/evaluation/*.json"))
PAGE = (ROOT / "docs" / "evaluation.md").read_text()


def test_there_are_some() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT / "benchmarks" / "results").as_posix())
def test_the_page_shows_it(path: Path) -> None:
    content = load(path)
    assert content["meta"]["weights"] == weights_digest(SHIPPED), "recorded with other weights: run rapidkda eval again"
    assert path.relative_to(ROOT).as_posix() in PAGE
    assert markdown(content) in PAGE, f"out of date: rapidkda eval --recorded {path.relative_to(ROOT)}"
