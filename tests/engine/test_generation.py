"""The engine says what transformers says, and shares the model's weights without changing them."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rapidkda.engine import Engine, EngineConfig, SamplingParams
from rapidkda.engine.model import PackedModel
from rapidkda.testing.models import build_glm5_next, build_kimi_linear

from .support import Prompt, random_prompts, run

NEW = 10


def generated(model: Any, prompts: Sequence[Prompt], new_tokens: int = NEW) -> list[tuple[int, ...]]:
    """Greedy generation of transformers, one prompt at a time."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        outputs.append(tuple(out[0, len(prompt) :].tolist()))
    return outputs


def sharing_glm() -> Any:
    """Two attention layers in a row, of which the second takes the first one's choice of tokens, and few of them."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    values = build_glm5_next(0, hidden_size=32, head_dim=16, index_topk=16, index_kpool=4).config.to_dict()
    values["text_config"]["layer_types"] = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    values["text_config"]["indexer_types"] = ["full", "full", "shared", "full"]
    config = Glm5NextConfig(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Glm5NextForConditionalGeneration(config).eval()


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


CASES = {
    "glm5_next": lambda: build_glm5_next(3, hidden_size=64, head_dim=32),
    "glm5_next with the unbounded gate": lambda: build_glm5_next(4, hidden_size=32, head_dim=16, lower_bound=None),
    "glm5_next, eager attention": lambda: eager(build_glm5_next(3, hidden_size=32, head_dim=16)),
    "kimi_linear": lambda: build_kimi_linear(3, hidden_size=64, head_dim=32),
    "kimi_linear, eager attention": lambda: eager(build_kimi_linear(3, hidden_size=32, head_dim=16)),
}


SPARSE = {
    "few chosen tokens": lambda: build_glm5_next(4, hidden_size=32, head_dim=16, index_topk=16, index_kpool=4),
    "a shared indexer": sharing_glm,
}


@pytest.mark.parametrize("case", CASES)
def test_greedy_generation_is_that_of_transformers(case: str) -> None:
    model = CASES[case]()
    prompts = random_prompts(5, seed=2, longest=90)
    want = generated(model, prompts)
    for form in ({}, {"max_drafts": 2}, {"record_rows": 4}):
        config = EngineConfig(max_num_batched_tokens=40, max_num_seqs=3, **form)
        assert [result.tokens for result in run(model, prompts, NEW, config)] == want


@pytest.mark.parametrize("case", SPARSE)
def test_sparse_attention_that_chooses_is_that_of_transformers(case: str) -> None:
    """Prompts in one chunk, as `generate` runs them.

    Many candidates of an untrained indexer score exactly 0, behind its ReLU, and which of them `topk` takes depends on
    the shape of the call: transformers does not agree with itself when it prefills in chunks.
    """
    model = SPARSE[case]()
    prompts = random_prompts(5, seed=2, longest=60, shortest=20)
    want = generated(model, prompts)
    config = EngineConfig(max_num_batched_tokens=400, max_num_seqs=4)
    assert [result.tokens for result in run(model, prompts, NEW, config)] == want


def test_weights_are_shared_and_the_model_goes_on_working(model: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([random_prompts(1, seed=3, shortest=20)[0]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    packed = PackedModel(model)
    for index, layer in packed.kda.items():
        module = packed.layers[index].self_attn
        storage = layer.in_proj.untyped_storage().data_ptr()
        linears = [module.q_proj, module.k_proj, module.v_proj, module.g_a_proj, module.b_proj]
        assert all(linear.weight.untyped_storage().data_ptr() == storage for linear in linears)
        assert module.o_proj.weight.data_ptr() == layer.o_proj.data_ptr()
        assert module.conv1d.weight.data_ptr() == layer.conv_weight.data_ptr()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, logits)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in before.items())


def test_two_engines_on_one_model(kimi: Any) -> None:
    prompts = random_prompts(3, seed=9)
    first, second = Engine(kimi, EngineConfig()), Engine(kimi, EngineConfig(max_drafts=2))
    params = SamplingParams(max_new_tokens=6)
    one, two = first.generate(prompts, params), second.generate(prompts, params)
    assert [result.tokens for result in one] == [result.tokens for result in two]


@pytest.mark.parametrize(("device", "head_dim"), [("cpu", 32), pytest.param("cuda", 128, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "form", [{"max_drafts": 3}, {"max_drafts": 3, "rollback": "slots"}, {"record_rows": 3}], ids=str
)
@pytest.mark.parametrize("build", [build_glm5_next, build_kimi_linear])
def test_bfloat16(build: Any, form: dict[str, Any], state_dtype: torch.dtype, device: str, head_dim: int) -> None:
    """Released dtypes run; logits are transformers' on the same text within bfloat16."""
    model = build(0, hidden_size=64, head_dim=head_dim, experts=2, dtype=torch.bfloat16).to(device)
    prompts = random_prompts(4, seed=5, shortest=20)
    config = EngineConfig(max_num_batched_tokens=40, max_num_seqs=3, state_dtype=state_dtype, **form)
    for result in Engine(model, config).generate(prompts, SamplingParams(max_new_tokens=6, keep_logits=True)):
        text = torch.tensor([[*result.prompt, *result.tokens]], device=device)
        with torch.no_grad():
            logits = model(input_ids=text).logits[0].float().cpu()
        want = logits[len(result.prompt) - 1 : -1]
        assert result.logits is not None
        assert (result.logits - want).norm() < 0.05 * want.norm()


def test_models_that_cannot_run_are_refused_by_name(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        Engine("model")
    with pytest.raises(ValueError, match=r"model must be a causal language model .*glm5_next, kimi_linear, got Linear"):
        Engine(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"got \w+Model \(model_type"):
        Engine(model.model)
    with pytest.raises(ValueError, match="drafter must be 'lookup', an MtpHead or a Drafter, got 'oracle'"):
        Engine(model, EngineConfig(), "oracle")
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match="model must be in evaluation mode"):
        Engine(other.train())
    other.eval().lm_head.to("meta")
    with pytest.raises(ValueError, match="model must have all of its weights on one device, got cpu, meta"):
        Engine(other)
    other = copy.deepcopy(model)
    other.config._attn_implementation_internal = "flash_attention_2"
    other.config.get_text_config()._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation sdpa or eager, got 'flash_attention_2'"):
        Engine(other)


def test_a_shared_indexer_without_a_layer_to_share_with_is_refused() -> None:
    model = build_glm5_next(0, hidden_size=32, head_dim=16)
    model.config.text_config.indexer_types = ["full", "full", "full", "shared"]
    with pytest.raises(ValueError, match=r"indexer_types\[3\] must be 'full'"):
        Engine(model)


def test_quantised_projections_are_refused(kimi: Any) -> None:
    class Other(nn.Linear):
        pass

    model = copy.deepcopy(kimi)
    attention = model.model.layers[0].self_attn
    attention.q_proj = Other(attention.q_proj.in_features, attention.q_proj.out_features, bias=False)
    with pytest.raises(ValueError, match="plain linear layers in its KDA layers, got Other"):
        Engine(model)


def test_backends_come_from_the_configuration_and_are_reported(kimi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rapidkda.errors import BackendUnavailable
    from rapidkda.serving import BackendWish

    report = Engine(kimi, EngineConfig(backends=BackendWish(prefill="torch"))).backend_report()
    assert report["backends"]["prefill"]["name"] == "torch"
    assert report["backends"]["prefill"]["source"] == "argument backend"
    with pytest.raises(BackendUnavailable, match="flashkda"):
        Engine(kimi, EngineConfig(backends=BackendWish(prefill="flashkda")))
    monkeypatch.setenv("RAPIDKDA_DECODE_BACKEND", "torch")
    source = Engine(kimi).backend_report()["backends"]["decode"]["source"]
    assert source == "environment variable RAPIDKDA_DECODE_BACKEND"


@pytest.mark.parametrize(
    ("form", "entry"),
    [
        ({}, "decode"),
        ({"record_rows": 4}, "verify"),
        ({"max_drafts": 1}, "verify"),
        ({"max_drafts": 1, "rollback": "slots"}, "verify_slots"),
    ],
)
def test_the_report_says_what_decodes(kimi: Any, form: dict[str, Any], entry: str) -> None:
    report = Engine(kimi, EngineConfig(**form)).backend_report()
    assert report["decoding"] == entry
    assert report["backends"][entry]["name"] == "torch"


def test_the_documented_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) == 1
    exec(blocks[0], {})
    assert capsys.readouterr().out.count("length") == 4
