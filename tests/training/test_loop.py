"""A few steps on the CPU: the loss falls, the log and the checkpoint are there, a run goes on where it stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rapidkda.training import checkpoint, loop, probe
from rapidkda.training.checkpoint import load_checkpoint, save_checkpoint
from rapidkda.training.forward import TrainingForward
from rapidkda.training.loop import Settings, Stage, rate_factor, train
from rapidkda.training.model import build, text_config

from .conftest import TINY


@pytest.fixture
def settings(corpus: Path, tmp_path: Path) -> Settings:
    return Settings(
        corpus=corpus,
        out=tmp_path / "out",
        minutes=10,
        stages=(Stage(128, 1.0),),
        batch_tokens=512,
        workers=0,
        compiled=False,
        probe_seconds=0.0,
        probe_length=128,
        device=torch.device("cpu"),
        dtype=torch.float32,
        most_steps=12,
        config=TINY,
    )


def test_the_loss_falls_and_a_continued_run_starts_there(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOG_EVERY", 1)
    monkeypatch.setattr(loop, "WARM_UP", 2)
    found = train(settings)
    records = [json.loads(line) for line in (settings.out / "log.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["event"] == "step"]
    assert len(losses) == 12
    assert losses[0] == pytest.approx(5.55, abs=0.15)  # log 256
    assert losses[-1] < losses[0] - 0.6
    assert records[-1]["event"] == "end"
    assert found["loss_text"] == pytest.approx(records[-1]["loss_text"], abs=1e-4)

    again = replace(settings, resume=settings.out, out=settings.out.parent / "more", most_steps=1, seed=1)
    train(again)
    records = [json.loads(line) for line in (again.out / "log.jsonl").read_text().splitlines()]
    assert next(r["loss"] for r in records if r["event"] == "step") < losses[0] - 0.5


def test_time_ends_a_run_with_a_checkpoint(settings: Settings) -> None:
    train(replace(settings, minutes=1e-3, most_steps=None))
    model, head = build(text_config(**TINY), 5)
    load_checkpoint(settings.out, model, head)


def test_checkpoints_are_whole_in_any_number_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PIECE", 100_000)
    saved, loaded = build(text_config(**TINY), 1), build(text_config(**TINY), 2)
    with pytest.raises(ValueError, match=r"must hold ckpt\.00"):
        load_checkpoint(tmp_path, *loaded)
    save_checkpoint(tmp_path, *saved)
    assert len(list(tmp_path.glob("ckpt.*"))) > 2
    load_checkpoint(tmp_path, *loaded)
    for one, other in zip(saved, loaded):
        for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items()):
            assert torch.equal(a, b), name


def test_rates_stay_then_fall() -> None:
    settings = Settings(corpus=Path(), out=Path(), minutes=1, rates=(1.0, 0.2), constant=0.5)
    assert [rate_factor(settings, elapsed) for elapsed in (0.0, 0.5, 0.75, 1.0, 1.1)] == pytest.approx(
        [1.0, 1.0, 0.6, 0.2, 0.2]
    )


def test_the_probe_counts_right_answers() -> None:
    """A forward that knows the next token gets everything right; one that is wrong at one digit loses that answer."""

    class Oracle(TrainingForward):
        def __init__(self) -> None:
            self.wrong: int | None = None

        def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.zeros(tokens.numel(), 1)

        def ahead(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            return hidden

        def losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            right = torch.ones(len(targets), dtype=torch.bool)
            if self.wrong is not None:
                right[self.wrong] = False
            return torch.zeros(len(targets)), right

    built = probe.build(16 * 1024, 1024, torch.device("cpu"))
    assert {task: len(spans) > 10 for task, spans in built.spans.items() if task != "copy"} == {
        "needles": True,
        "arithmetic": True,
    }
    for task, spans in built.spans.items():
        text = bytes(built.tokens[spans[0][0]].tolist()).decode("latin-1")
        answer = text[spans[0][1] : spans[0][2]]
        assert answer.isdigit() if task == "needles" else "Answer: " in answer or task == "copy"
    oracle = Oracle()
    assert built.measure(oracle)["right_needles"] == 1.0
    row, _, end = built.spans["needles"][3]
    oracle.wrong = row * 1024 + end - 2  # predicts the last digit
    count = len(built.spans["needles"])
    assert built.measure(oracle)["right_needles"] == pytest.approx(1 - 1 / count)
