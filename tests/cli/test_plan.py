"""`rapidkda plan` prints what the CUDA backend's planner would choose."""

from __future__ import annotations

import pytest

from rapidkda.backends.cuda.host.plan import plan_prefill
from rapidkda.testing.shapes import PREFILL

from .conftest import Cli


def test_every_workload_has_a_row(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = cli("plan")
    assert done.code == 0
    for shape in PREFILL:
        assert shape.name in done.out


def test_a_step_of_ones_own(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = cli("plan", "--seq-lens", "16384", "--heads", "8")
    chosen = plan_prefill(1, 1024, 1024, 8, 132)
    assert done.code == 0
    assert chosen.form in done.out
    assert f"{chosen.predicted_us:.0f}" in done.out


@pytest.mark.parametrize("lengths", ["", "0", "a,b", "5,,6", "-4"])
def test_bad_lengths_are_refused_by_name(cli: Cli, lengths: str) -> None:
    done = cli("plan", "--seq-lens", lengths)
    assert done.code == 2
    assert "--seq-lens" in done.err
