"""`rapidkda bench`: from a measurement to the README, on small workloads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rapidkda.bench import cpu
from rapidkda.bench.report import README_BEGIN, README_END
from rapidkda.bench.result import Result
from rapidkda.testing import Shape

from .conftest import Cli


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PREFILL", Shape("short", (70,), 2))
    monkeypatch.setattr(cpu, "DECODE_BATCH", 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("small")
def test_measure_report_compare_readme(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "benchmarks" / "results" / "cpu" / "one.json"
    done = cli("bench", "cpu", "--rounds", "1", "--regime", "fast", "--regime", "slow", "--out", str(path))
    assert done.code == 0, done.err
    assert "torch is" in done.out
    assert "as fast as transformers-chunk" in done.out
    result = Result.load(path)
    assert {(row.bench, row.regime) for row in result.rows} == {
        (bench, regime) for bench in ("cpu_prefill", "cpu_decode") for regime in ("fast", "slow")
    }
    assert result.meta.gpu.startswith("CPU, ")

    report = cli("bench", "report", str(path))
    assert report.code == 0
    assert report.out in done.out

    same = cli("bench", "compare", str(path), str(path))
    assert same.code == 0
    assert "over 10 rows: 1.000" in same.out

    readme = tmp_path / "README.md"
    readme.write_text(f"# title\n{README_BEGIN}\n{README_END}\nend\n")
    root = ("--root", str(tmp_path))
    assert cli("bench", "readme", *root, "--check").code == 1
    assert "| short |" not in readme.read_text(), "--check changes nothing"
    assert cli("bench", "readme", *root).code == 0
    rows = [line for line in readme.read_text().splitlines() if line.startswith("| short |")]
    assert len(rows) == 1, "the worst regime of a shape, whichever it was"
    assert readme.read_text().endswith("end\n")
    assert cli("bench", "readme", *root, "--check").code == 0


@pytest.mark.usefixtures("small")
def test_a_wrong_result_fails_the_run(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.ops.prefill
    monkeypatch.setattr(cpu.ops, "prefill", lambda *args, **options: right(*args, **options).mul_(1.01))
    done = cli("bench", "prefill", "--backend", "torch", "--peers", "none", "--shape", "one_token", "--rounds", "1")
    assert done.code == 1
    assert "torch one_token fast: errors" in done.err
    cpu_run = cli("bench", "cpu", "--rounds", "1")
    assert cpu_run.code == 1
    assert "nothing timed" in cpu_run.err
