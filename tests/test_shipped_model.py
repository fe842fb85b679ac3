"""The model that ships: loads in transformers and the engine with equal logits, and can do what its card says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rapidkda.engine import Engine, EngineConfig, MtpHead, SamplingParams
from rapidkda.engine.loading import HEAD_FILE, SHIPPED, load_model
from rapidkda.training import tasks

pytest.importorskip("transformers")
LARGEST = 25_000_000  # bytes of the whole folder


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(SHIPPED, dtype=torch.float32)


def tokens_of(sample: tasks.Sample) -> Tensor:
    return torch.tensor([list(sample.tokens)])


def right(model: Any, sample: tasks.Sample) -> list[bool]:
    """Of each answer, whether every token of it is the most likely one after the tokens before it."""
    tokens = tokens_of(sample)
    with torch.no_grad():
        best = model(input_ids=tokens).logits[0].argmax(-1)
    return [bool((best[a.start - 1 : a.end - 1] == tokens[0, a.start : a.end]).all()) for a in sample.answers]


def test_it_is_small_and_says_what_it_is() -> None:
    files = sorted(path.name for path in SHIPPED.iterdir())
    assert files == ["README.md", "config.json", "generation_config.json", "model.safetensors", "mtp.safetensors"]
    assert sum((SHIPPED / name).stat().st_size for name in files) < LARGEST
    card = (SHIPPED / "README.md").read_text()
    for heading in ("## Training", "## Decay half-lives", "## Data", "## Licence"):
        assert heading in card


def test_the_engine_gives_the_logits_of_transformers_on_real_text(model: Any) -> None:
    prompt = list(tasks.held_out_text()[:300].encode())
    with torch.no_grad():
        want = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    head = MtpHead.from_config(model.config.get_text_config(), dtype=torch.float32)
    head.load_weights(SHIPPED / HEAD_FILE)
    config = EngineConfig(max_num_batched_tokens=256, max_num_seqs=1, prefill_chunk=128, max_drafts=3)
    engine = Engine(model, config, head)
    result = engine.generate([prompt], SamplingParams(max_new_tokens=24, keep_logits=True))[0]
    assert result.logits is not None
    torch.testing.assert_close(result.logits[0], want, rtol=1e-3, atol=1e-3)
    assert result.stats.accepted > 0.15 * result.stats.drafted  # a head without training is right once in 256


def test_it_finds_needles(model: Any) -> None:
    found = [hit for seed in range(2) for hit in right(model, tasks.needles(seed, "test", length=1024, count=24))]
    assert sum(found) >= 0.9 * len(found)


def test_it_does_sums(model: Any) -> None:
    assert sum(right(model, tasks.arithmetic(seed, "test"))[0] for seed in range(10)) >= 8


def test_it_copies(model: Any) -> None:
    sample = tasks.copy(1, "test", length=512)
    tokens = tokens_of(sample)
    with torch.no_grad():
        best = model(input_ids=tokens).logits[0].argmax(-1)
    answer = sample.answers[0]
    hits = best[answer.start - 1 : answer.end - 1] == tokens[0, answer.start : answer.end]
    assert hits.float().mean() > 0.97


def test_generation_ends_at_the_end_of_a_document() -> None:
    from transformers import GenerationConfig

    assert GenerationConfig.from_pretrained(SHIPPED).eos_token_id == 0
    assert Path(SHIPPED / "config.json").is_file()


def test_the_page_of_the_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[1] / "docs" / "model.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert len(blocks) == 1
    exec(blocks[0], {})
    assert "Answer: 82" in capsys.readouterr().out
