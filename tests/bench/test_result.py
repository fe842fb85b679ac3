"""The result file, the report, the comparison and the README's table."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rapidkda.bench.report import compare, markdown, newest, plot, readme_section, readme_text
from rapidkda.bench.result import Meta, Result, Row

META = Meta("NVIDIA H200", 132, 4.25, "580.1", "2.11.0", "3.6.0", "0.1.0", "abc", "2026-11-02T10:00:00Z")
CUDA = Row("prefill", "8x2048_h16", "slow", "cuda", 150.0, 149.0, 152.0, 21.0, 1, 83.0, 4.1e-3, 3.1e-3)
TRITON = replace(CUDA, impl="triton", us=200.0)
FLASHKDA = replace(CUDA, impl="flashkda", us=300.0)
CPU_ROW = replace(CUDA, bench="cpu_decode", shape="decode_b64_h8", impl="torch", floor_us=None)
RESULT = Result(META, (CUDA, TRITON, FLASHKDA, CPU_ROW))


def test_round_trip(tmp_path: Path) -> None:
    RESULT.save(tmp_path / "r.json")
    assert Result.load(tmp_path / "r.json") == RESULT
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_fields_are_those_of_the_documented_schema(tmp_path: Path) -> None:
    RESULT.save(tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    documented = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    for fields in (content["meta"], content["rows"][0]):
        for field in fields:
            assert f"`{field}`" in documented, f"docs/benchmarks.md does not describe {field}"
    assert set(content) == {"meta", "rows"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"extra": 1}, "extra"),
        ({"us": None}, "us"),
        ({"us": "fast"}, "us"),
        ({"bench": "sprint"}, "sprint"),
        ({"impl": ...}, "impl"),
    ],
)
def test_wrong_rows_are_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    row = {key: value for key, value in {**asdict(CUDA), **change}.items() if value is not ...}
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"meta": asdict(META), "rows": [row]}))
    with pytest.raises(ValueError, match=rf"row 0.*{named}"):
        Result.load(path)


def test_report_compares_our_best_with_the_best_peer() -> None:
    text = markdown(RESULT)
    line = next(line for line in text.splitlines() if line.startswith("| 8x2048_h16"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["8x2048_h16", "slow", "83", "150", "200", "300", "2.00", "1.81", "4.1e-03, 3.1e-03"]
    assert "NVIDIA H200" in text
    assert "- slow: best peer / ours 2.00 in the geometric mean of 1, 2.00 at least" in text
    assert "### Decode on a CPU" in text


def test_worst_regime_of_a_shape() -> None:
    fast = [replace(CUDA, regime="fast", us=100.0), replace(FLASHKDA, regime="fast", us=300.0)]
    unbounded = replace(CUDA, regime="unbounded", us=900.0)  # no peer measured: no ratio to be worst in
    text = markdown(Result(META, (*fast, CUDA, FLASHKDA, unbounded)), worst_only=True)
    assert [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| 8x2048")] == ["slow"]
    assert "- fast: best peer / ours 3.00" in text  # summaries count every row
    alone = markdown(Result(META, (replace(CUDA, regime="fast"), unbounded)), worst_only=True)
    assert "| 8x2048_h16 | unbounded |" in alone
    assert "| 8x2048_h16 | fast |" not in alone


def test_newest_files_cover_every_backend(tmp_path: Path) -> None:
    for name, date, rows in (
        ("old-cuda", "2026-11-01", (CUDA, FLASHKDA)),
        ("cuda", "2026-11-02", (CUDA, FLASHKDA)),
        ("triton", "2026-11-03", (TRITON, FLASHKDA)),
    ):
        (tmp_path / "h200").mkdir(exist_ok=True)
        Result(replace(META, date=date, note=name), rows).save(tmp_path / "h200" / f"{name}.json")
    assert [path.stem for path in newest(tmp_path)] == ["triton", "cuda"]


def test_comparison() -> None:
    faster = Result(META, (replace(CUDA, us=75.0), FLASHKDA, replace(TRITON, shape="other")))
    text = compare(RESULT, faster)
    assert "| prefill | 8x2048_h16 | slow | cuda | 150 | 75 | 2.000 |" in text
    assert "| prefill | other | slow | triton | | 200 | new |" in text
    assert "| prefill | 8x2048_h16 | slow | triton | 200 | | gone |" in text
    assert "over 2 rows: 1.414" in text


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = plot(RESULT, tmp_path / "r")
    assert [path.name for path in written] == ["r-prefill.png", "r-cpu_decode.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_readme_takes_the_newest_file_of_every_machine_and_backend(tmp_path: Path) -> None:
    root, folder = tmp_path, tmp_path / "benchmarks" / "results"
    for gpu, date, us in (("h200", "2026-11-01", 999.0), ("h200", "2026-11-03", 140.0), ("b200", "2026-11-02", 70.0)):
        (folder / gpu).mkdir(parents=True, exist_ok=True)
        one = Result(replace(META, date=date, gpu=gpu), (replace(CUDA, us=us),))
        one.save(folder / gpu / f"{date}-abc.json")
    assert [path.name for path in newest(folder)] == ["2026-11-03-abc.json", "2026-11-02-abc.json"]
    section = readme_section(folder, root)
    assert "999" not in section
    assert "| 140 |" in section
    assert "(benchmarks/results/h200/2026-11-03-abc.json)" in section
    begin, end = (
        "<!-- generated by `rapidkda bench readme`: begin -->",
        "<!-- generated by `rapidkda bench readme`: end -->",
    )
    text = readme_text(f"before\n{begin}\nold\n{end}\nafter\n", section)
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert readme_text(text, section) == text
    with pytest.raises(ValueError, match="README must hold"):
        readme_text("no markers", section)
