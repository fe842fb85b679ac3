"""The script that records vLLM with the plugin off and on: its checkpoint and arithmetic. vLLM itself needs a GPU."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_checkpoint_is_a_kimi_linear_model_with_a_byte_tokenizer_and_a_known_continuation(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.17")
    checkpoint = importlib.import_module("kimi_linear_checkpoint")
    record = importlib.import_module("vllm_record")
    checkpoint.write(tmp_path, checkpoint.Sizes(layers=4, hidden=384, heads=4, feed_forward=512), seed=3)
    assert checkpoint.recalls(tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {name: found for name, found in report.items() if found} == {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "héllo,\n  \x00world"
    assert bytes(tokenizer(text).input_ids) == text.encode()
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    (prompt,) = record.prompts([150], seed=5)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    with torch.no_grad():
        chosen = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert bytes(chosen.tolist()) == checkpoint.continuation(prompt.encode(), 12)


def test_known_continuations() -> None:
    checkpoint = importlib.import_module("kimi_linear_checkpoint")
    record = importlib.import_module("vllm_record")
    assert checkpoint.continuation(b"abacad", 1) is None  # nothing has followed d
    assert checkpoint.continuation(b"abacada", 4) == b"dada"
    assert checkpoint.continuation(b"xyzx", 3) == b"yzx"
    texts = ["xyzx", "abacad", "abacada"]
    answers = [answer(list(tokens), []) for tokens in (b"yzx", b"aaa", b"dad")]
    assert record.known(texts, answers) == {"prompts": 2, "right": 2}
    answers[0] = answer(list(b"yzy"), [])
    assert record.known(texts, answers) == {"prompts": 2, "right": 1}


def answer(tokens: list[int], steps: list[dict[int, float]]) -> dict[str, object]:
    return {"prompt": 5, "tokens": tokens, "steps": steps}


def test_first_divergence_and_log_probabilities_before_it() -> None:
    record = importlib.import_module("vllm_record")
    same = [{1: -0.1, 2: -3.0}, {1: -0.5, 2: -1.0}, {1: -0.2, 2: -2.0}]
    near = [{1: -0.1, 2: -3.0}, {1: -0.8, 2: -0.7}, {2: -9.0, 3: -0.1}]
    want = [answer([1, 1, 1], same), answer([1, 1, 1], same)]
    got = [answer([1, 1, 1], same), answer([1, 2, 3], near)]
    found = record.compare(want, got)
    assert (found["prompts"], found["identical"]) == (2, 1)
    (parted,) = found["parted"]
    assert (parted["prompt"], parted["at"], parted["tokens"]) == (1, 1, [1, 2])
    assert parted["logprobs"] == [[-0.5, -1.0], [-0.8, -0.7]]
    assert parted["gaps"] == pytest.approx([0.5, 0.1])
    assert found["largest_gap"] == pytest.approx(0.5)
    assert found["logprobs_compared"] == 6 + 4  # nothing behind the parting
    assert found["logprob_difference_max"] == pytest.approx(0.3)


def test_lengths_span_their_range_and_prompts_have_them() -> None:
    record = importlib.import_module("vllm_record")
    lengths = record.spread(50, 100, 8000)
    assert (len(lengths), min(lengths), max(lengths)) == (50, 100, 8000)
    assert lengths != sorted(lengths)
    assert [len(text.encode()) for text in record.prompts(lengths, seed=1)] == lengths
    assert record.prompts([20], seed=1) != record.prompts([20], seed=2)


def test_medians() -> None:
    record = importlib.import_module("vllm_record")
    runs = [
        {"seconds": seconds, "prompt_tokens": 300, "output_tokens": 6, "first_token_seconds": [seconds / 2]}
        for seconds in (3.0, 1.0, 2.0)
    ]
    found = record.median_times(runs)
    assert (found["seconds"], found["seconds_min"], found["seconds_max"]) == (2.0, 1.0, 3.0)
    assert (found["prompt_tokens_per_second"], found["output_tokens_per_second"]) == (150.0, 3.0)
    assert math.isclose(found["median_first_token_seconds"], 1.0)


def test_the_page_quotes_the_record() -> None:
    record = importlib.import_module("vllm_record")
    page = (ROOT / "docs" / "integrations" / "vllm.md").read_text()
    paths = sorted((ROOT / "benchmarks" / "results" / "h200" / "vllm").glob("*.json"))
    assert paths
    for path in paths:
        assert record.report(json.loads(path.read_text())) in page
        assert f"benchmarks/results/h200/vllm/{path.name}" in page
