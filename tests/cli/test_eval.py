"""`rapidkda eval` and `rapidkda capture` on a small random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rapidkda.backends.torch import TorchBackend
from rapidkda.cli import eval as command
from rapidkda.evaluation import Sizes, Spans
from rapidkda.evaluation.markdown import markdown
from rapidkda.evaluation.result_file import weights_digest
from rapidkda.testing import captured
from rapidkda.testing.models import build_glm5_next

from .conftest import Cli

pytest.importorskip("transformers")

CAPTURED = Path(__file__).parents[1] / "data" / "captured.safetensors"
TINY = Sizes(60, 2, Spans(80, 6, 20), (128, 256), 1, 3, 2, 40, 6, 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head dim 128, as the battery asks for."""
    path = tmp_path_factory.mktemp("model") / "small"
    build_glm5_next(0, hidden_size=32, heads=1, experts=2).save_pretrained(path)
    return path


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "QUICK", TINY)


@pytest.mark.usefixtures("tiny")
def test_eval_writes_tables_json_and_plots(cli: Cli, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, plots = tmp_path / "eval.json", tmp_path / "plots"
    asked = ("--model", str(folder), "--quick", "--backend", "torch", "--comparison", "both", "--device", "cpu")
    done = cli("eval", *asked, "--out", str(out), "--plots", str(plots))
    assert done.code in (0, 1), "random weights may be outside the budget"
    assert "arithmetic %" in done.out
    assert "256" in done.out
    content = json.loads(out.read_text())
    assert [(one["name"], one["comparison"]) for one in content["judged"]] == [
        ("torch", "operator"),
        ("torch", "model"),
        ("torch-float32", "operator"),
    ]
    narrow, model, exact = content["judged"]
    assert exact["within"]
    assert exact["drifts"][0]["mean_abs"]["value"] < 1e-5 < narrow["drifts"][0]["mean_abs"]["value"]
    assert [drift["kind"] for drift in exact["drifts"]] == ["all", "prefill", "decode", "verify"]
    assert [drift["tokens"] for drift in exact["drifts"]] == [2 * 106, 2 * 80, 2 * 6, 2 * 20]
    assert len(exact["tasks"]["needles"]["outcomes"]) == len(content["questions"]["needles"])
    assert exact["agreement"]["lengths"] == [6, 6]
    assert [verdict["what"] for verdict in model["verdicts"]] == ["needles, difference", "arithmetic, difference"]
    assert done.code == (0 if all(one["within"] for one in content["judged"]) else 1)
    assert {path.name for path in plots.iterdir()} == {"needles.png", "logprobs.png", "half_lives.png"}
    shown = cli("eval", "--recorded", str(out), "--plots", str(tmp_path / "again"))
    assert shown.code == 0
    assert shown.out == markdown(content)
    assert "| torch | model | " in shown.out
    assert (tmp_path / "again" / "needles.png").read_bytes() == (plots / "needles.png").read_bytes()
    assert content["meta"]["weights"] == weights_digest(folder)
    assert len(content["half_lives"]) == 3
    assert all(len(head["tokens"]) == 128 for head in content["half_lives"])


@pytest.mark.usefixtures("tiny")
def test_a_failing_backend_is_told_and_keeps_none_from_its_turn(
    cli: Cli,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = TorchBackend.verify

    def failing(self: TorchBackend, call: Any) -> None:
        if call.tokens.q.dtype == torch.bfloat16:
            raise RuntimeError("launch failed")
        real(self, call)

    monkeypatch.setattr(TorchBackend, "verify", failing)
    done = cli("eval", "--model", str(folder), "--quick", "--backend", "torch", "--device", "cpu")
    assert done.code == 1
    assert "FAILED" in done.out
    assert "torch, operator: failed: RuntimeError: launch failed" in done.err
    assert [line.split()[-1] for line in done.out.splitlines() if " operator " in line][:2] == ["FAILED", "within"]


@pytest.mark.usefixtures("tiny")
def test_jobs_judge_as_one_process_does(cli: Cli, folder: Path, tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.json"
        asked = ("--model", str(folder), "--quick", "--backend", "torch", "--device", "cpu", "--jobs", jobs)
        cli("eval", *asked, "--out", str(out))
        content = json.loads(out.read_text())
        assert [one["error"] for one in content["judged"]] == [None, None]
        for one in content["judged"]:
            del one["seconds"]
        found.append(content)
    assert found[0]["judged"] == found[1]["judged"]
    assert found[0]["reference_outcomes"] == found[1]["reference_outcomes"]


def test_capture_is_taken_by_verify_and_bench(cli: Cli, folder: Path, tmp_path: Path) -> None:
    text, out, rows = tmp_path / "text.txt", tmp_path / "few.safetensors", tmp_path / "rows.json"
    text.write_text("A little text of some hundred bytes. " * 9)
    asked = ("--model", str(folder), "--text", str(text), "--out", str(out), "--tokens", "100", "--skip", "20")
    done = cli("capture", *asked, "--layer", "1", "--layer", "0", "--device", "cpu")
    assert done.code == 0, done.err
    assert captured.load(out).beta.shape == (100, 2)
    taken = ("--inputs", str(out), "--backend", "torch")
    done = cli("verify", *taken, "--device", "cpu", "--shape", "chunk_and_tail", "--shape", "narrow_keys")
    assert done.code == 0, done.out
    assert "captured" in done.out
    assert "narrow_keys" not in done.out, "another head dim"
    done = cli("bench", "decode", *taken, "--batch", "3", "--rounds", "1", "--replays", "1", "--out", str(rows))
    assert done.code == 0, done.err
    assert {row["regime"] for row in json.loads(rows.read_text())["rows"]} == {"captured"}


def test_the_captured_file_of_the_repository(cli: Cli) -> None:
    """Two KDA layers of the trained model on real text."""
    assert CAPTURED.stat().st_size < 1_000_000
    found = captured.load(CAPTURED)
    assert found.beta.shape == (160, 4)
    assert bool(found.states.any())
    done = cli("verify", "--inputs", str(CAPTURED), "--backend", "torch", "--device", "cpu", "--quick")
    assert done.code == 0, done.out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--backend", "cutlass"), "cutlass"),
        (("--device", "tpu"), "--device"),
        (("--out", "."), "--out"),
        (("--flashkda", "no.so"), "no.so"),
    ],
)
def test_mistakes(cli: Cli, folder: Path, change: tuple[str, ...], named: str) -> None:
    done = cli("eval", "--model", str(folder), *change)
    assert done.code == 2
    assert named in done.err
    assert done.err.count("\n") == 1


def test_a_model_with_a_tokenizer_is_refused(cli: Cli, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "words"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).symlink_to(path)
    (other / "tokenizer.json").write_text("{}")
    done = cli("eval", "--model", str(other))
    assert done.code == 2
    assert "model must read bytes" in done.err
