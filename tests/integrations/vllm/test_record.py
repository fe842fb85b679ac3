"""The script that records vLLM with the plugin off and on: its checkpoint and arithmetic. vLLM itself needs a GPU."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPTS = Path(__file__).parents[3] / "scripts"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_checkpoint_is_a_kimi_linear_model_with_a_byte_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.17")
    checkpoint = script("kimi_linear_checkpoint")
    sizes = checkpoint.Sizes(layers=4, hidden=64, heads=2, feed_forward=128, latent=32)
    checkpoint.write(tmp_path, sizes, seed=3)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert {name: found for name, found in report.items() if found} == {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "héllo,\n  \x00world"
    ids = tokenizer(text).input_ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    with torch.no_grad():
        chosen = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert set(chosen.tolist()) <= set(checkpoint.LIVE_TOKENS)


def answer(tokens: list[int], steps: list[dict[int, float]]) -> dict[str, object]:
    return {"prompt": 5, "tokens": tokens, "steps": steps}


def test_first_divergence_and_log_probabilities_before_it() -> None:
    record = script("vllm_record")
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
    record = script("vllm_record")
    lengths = record.spread(50, 100, 8000)
    assert (len(lengths), min(lengths), max(lengths)) == (50, 100, 8000)
    assert lengths != sorted(lengths)
    assert [len(text.encode()) for text in record.prompts(lengths, seed=1)] == lengths
    assert record.prompts([20], seed=1) != record.prompts([20], seed=2)


def test_medians() -> None:
    record = script("vllm_record")
    runs = [
        {"seconds": seconds, "prompt_tokens": 300, "output_tokens": 6, "first_token_seconds": [seconds / 2]}
        for seconds in (3.0, 1.0, 2.0)
    ]
    found = record.median_times(runs)
    assert (found["seconds"], found["seconds_min"], found["seconds_max"]) == (2.0, 1.0, 3.0)
    assert (found["prompt_tokens_per_second"], found["output_tokens_per_second"]) == (150.0, 3.0)
    assert math.isclose(found["median_first_token_seconds"], 1.0)
