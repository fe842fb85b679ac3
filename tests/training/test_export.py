"""The exported folder: equal logits in transformers and in the engine, and a card that tells what was logged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rapidkda.engine import Engine, EngineConfig, MtpHead, SamplingParams
from rapidkda.engine.loading import load_model
from rapidkda.training.batches import KINDS
from rapidkda.training.checkpoint import save_checkpoint
from rapidkda.training.export import HEAD_FILE, export
from rapidkda.training.model import build, text_config
from rapidkda.training.tasks import TASKS

from .conftest import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exported")
    model, head = build(text_config(**TINY), 3)
    for parameter in [*model.parameters(), *head.parameters()]:
        parameter.data += 0.05 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
        )
    save_checkpoint(place / "checkpoint", model, head)
    point = {"tokens": 2_000_000, "seconds": 30.0, "step": 40, "loss_text": 1.2345, "right_mtp_text": 0.4}
    point |= {"right_needles": 0.912, "right_arithmetic": 0.873, "right_copy": 1.0}
    point |= {"mixture": {"text": 0.6, "needles": 0.2, "arithmetic": 0.1, "copy": 0.1}, "lengths": [512, 4096]}
    point |= {f"loss_{kind}": 1.2345 for kind in KINDS} | {f"answer_loss_{task}": 0.0123 for task in TASKS}
    point |= {"batch_tokens": 50_000, "corpus_bytes": 29_600_000}
    for name in ("one", "two"):
        records = [json.dumps({"event": event} | point) for event in ("start", "probe", "end")]
        (place / f"{name}.jsonl").write_text("\n".join(records))
    export(place / "checkpoint", [place / "one.jsonl", place / "two.jsonl"], place / "out", **TINY)
    return place / "out"


def test_the_engine_and_transformers_give_equal_logits_and_drafts_change_nothing(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32)
    prompt = list(b"We the People")
    with torch.no_grad():
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    config = EngineConfig(max_num_batched_tokens=32, max_num_seqs=1, max_drafts=3)
    head = MtpHead.from_config(model.config.get_text_config(), dtype=torch.float32)
    head.load_weights(folder / HEAD_FILE)
    engine = Engine(model, config, head)
    result = engine.generate([prompt], SamplingParams(max_new_tokens=6, keep_logits=True))[0]
    assert result.logits is not None
    torch.testing.assert_close(result.logits, torch.cat(want.logits), rtol=1e-4, atol=1e-4)
    assert list(result.tokens) == want.sequences[0, len(prompt) :].tolist()
    assert result.stats.drafted > 0


def test_weights_are_bfloat16_but_for_what_the_family_keeps(folder: Path) -> None:
    """What the family keeps in float32 depends on the version of transformers: 5.24 adds the hyper-connections."""
    model = load_model(folder)
    family = tuple(model._keep_in_fp32_modules_strict)
    assert {"conv1d", "dt_bias", "A_log"} <= set(family)
    for name, parameter in model.named_parameters():
        kept = any(part in name for part in family)
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name


def test_the_card_tells_what_was_logged(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    assert "| 4 | 1.234 | 91.2 % | 87.3 % | 100.0 % | 40.0 % |" in card
    assert "| 2 | 0.5 | 2 | 50,000 | 512, 4,096 | 29.6 | 60 | 20 | 10 | 10 |" in card
    assert "needles 1.234, arithmetic 1.234" in card
    assert "needles 0.0123, arithmetic 0.0123, copy 0.0123." in card
    assert "2 runs, 1.0 minutes" in card
    assert "4 M tokens in 80 steps" in card
    assert card.count("| MTP |") == TINY["linear_num_heads"]
    assert "PSF License Version 2" in card
