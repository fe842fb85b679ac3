"""The multi-token prediction head: its drafts against the whole text through modules of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from rapidkda.engine import Engine, EngineConfig, MtpDrafter, MtpHead, Request, SamplingParams

from .support import Knowing, Prompt, assert_empty, plain, random_prompts, run

NORMS = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "norm")


def attention_module(model: Any) -> Any:
    """A KDA module of transformers with fresh random weights."""
    kind = type(
        next(layer for layer in model.modules() if layer.__class__.__name__.endswith(("DecoderLayer",))).self_attn
    )
    module = kind(model.config.get_text_config(), 0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return module.eval()


def random_weights(model: Any) -> tuple[dict[str, Tensor], Any]:
    """An MTP head's tensors under our names, and its attention as a module of transformers."""
    config = model.config.get_text_config()
    hidden, inner = config.hidden_size, config.intermediate_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        module = attention_module(model)
        tensors = {f"mtp.{name}.weight": 1 + 0.1 * torch.randn(hidden) for name in NORMS}
        tensors["mtp.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
        tensors["mtp.mlp.gate_proj.weight"] = torch.randn(inner, hidden) / hidden**0.5
        tensors["mtp.mlp.up_proj.weight"] = torch.randn(inner, hidden) / hidden**0.5
        tensors["mtp.mlp.down_proj.weight"] = torch.randn(hidden, inner) / inner**0.5
    tensors |= {f"mtp.self_attn.{name}": value.detach().clone() for name, value in module.named_parameters()}
    return tensors, module


def head_of(model: Any, tensors: dict[str, Tensor]) -> MtpHead:
    head = MtpHead.from_config(model.config.get_text_config(), dtype=torch.float32)
    head.load_weights(tensors)
    return head


class Reference:
    """The head over a whole text at once, without any cache or slot."""

    def __init__(self, model: Any, tensors: dict[str, Tensor], module: Any):
        self._model, self._tensors, self._module = model, tensors, module
        self._eps = model.config.get_text_config().rms_norm_eps

    @torch.no_grad()
    def drafts(self, text: Sequence[int], count: int) -> tuple[list[int], float]:
        """Greedy drafts after a text, and the closest decision on the way."""
        text_model = getattr(self._model.model, "language_model", self._model.model)
        states = text_model(input_ids=torch.tensor([text])).last_hidden_state[0][:-1]
        tokens, drafts, margin = list(text), [], torch.inf
        for _ in range(count):
            out = self._head(text_model.embed_tokens(torch.tensor(tokens[1:])), states)
            best = self._model.lm_head(out[-1]).topk(2)
            margin = min(margin, float(best.values[0] - best.values[1]))
            drafts.append(int(best.indices[0]))
            tokens.append(drafts[-1])
            states = torch.cat([states, out[-1:]])
        return drafts, margin

    def _head(self, embeddings: Tensor, states: Tensor) -> Tensor:
        weight = self._tensors
        x = (
            torch.cat([self._norm(embeddings, "enorm"), self._norm(states, "hnorm")], -1)
            @ weight["mtp.eh_proj.weight"].T
        )
        x = x + self._module(self._norm(x, "input_layernorm")[None])[0]
        y = self._norm(x, "post_attention_layernorm")
        gate, up = y @ weight["mtp.mlp.gate_proj.weight"].T, y @ weight["mtp.mlp.up_proj.weight"].T
        return self._norm(x + (F.silu(gate) * up) @ weight["mtp.mlp.down_proj.weight"].T, "norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self._eps).rsqrt()
        return x * scale * self._tensors[f"mtp.{name}.weight"]


class Checked(Knowing):
    """Drafts with known acceptance go to the engine; what the head would have drafted is written down."""

    def __init__(self, truth: dict[Prompt, tuple[int, ...]], inner: MtpDrafter):
        super().__init__(truth, seed=4, inner=inner)
        self.head = inner
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        for (request, _), drafts in zip(wanted, self.head.propose(wanted), strict=True):
            self.seen.append((list(request.tokens), drafts))
        return super().propose(wanted)


def test_drafts_are_those_of_the_whole_text_whatever_was_accepted_before(model: Any) -> None:
    prompts = random_prompts(6, seed=31, longest=40)
    truth = plain(model, prompts, 10)
    tensors, module = random_weights(model)
    config = EngineConfig(max_num_batched_tokens=32, max_num_seqs=4, max_drafts=3)
    engine = Engine(model, config, Knowing(truth, seed=0))
    checked = Checked(truth, MtpDrafter(head_of(model, tensors), engine.model, config))
    engine._drafter = checked
    results = engine.generate(prompts, SamplingParams(max_new_tokens=10))
    assert {result.prompt: result.tokens for result in results} == truth
    assert sum(result.stats.accepted for result in results) > 10
    assert_empty(engine)
    assert checked.head._tracks == {}
    reference = Reference(model, tensors, module)
    compared = {0: 0, 1: 0, 2: 0, 3: 0}
    for text, drafts in checked.seen:
        want, margin = reference.drafts(text, len(drafts))
        if margin > 1e-3:  # wider than rounding
            assert drafts == want
            compared[len(drafts)] += 1
    assert compared[3] > 10
    assert compared[2] > 0
    assert compared[1] > 0


@pytest.mark.parametrize("rollback", ["replay", "slots"])
def test_greedy_output_does_not_depend_on_the_head(model: Any, rollback: Any) -> None:
    prompts = random_prompts(20, seed=32, longest=40)
    want = plain(model, prompts, 8)
    head = head_of(model, random_weights(model)[0])
    config = EngineConfig(
        max_num_batched_tokens=64, max_num_seqs=8, max_drafts=3, rollback=rollback, max_cached_tokens=150
    )
    results = run(model, prompts, 8, config, head)
    assert {result.prompt: result.tokens for result in results} == want
    assert sum(result.stats.drafted for result in results) > 100


def test_cancelling_frees_the_heads_slots(kimi: Any) -> None:
    engine = Engine(kimi, EngineConfig(max_num_seqs=2, max_drafts=3), head_of(kimi, random_weights(kimi)[0]))
    prompts = random_prompts(8, seed=33)
    names = [engine.add_request(prompt, SamplingParams(max_new_tokens=8)) for prompt in prompts]
    for name in names[:6]:
        engine.step()
        engine.abort(name)
    while engine.unfinished:
        engine.step()
    assert all(engine.take_result(name).finish_reason == "length" for name in names[6:])
    assert isinstance(engine._drafter, MtpDrafter)
    assert engine._drafter._pool.slots is not None
    assert engine._drafter._pool.slots.available == 4
    assert engine.memory().drafter == engine._drafter.nbytes > 0


def test_weights_load_from_files_and_faults_are_named(kimi: Any, tmp_path: Path) -> None:
    tensors, _ = random_weights(kimi)
    save_file(tensors, tmp_path / "mtp.safetensors")
    from_file = MtpHead.from_config(kimi.config, dtype=torch.float32)
    from_file.load_weights(tmp_path / "mtp.safetensors")
    direct = head_of(kimi, tensors).state_dict()
    assert all(torch.equal(value, direct[name]) for name, value in from_file.state_dict().items())
    head = MtpHead.from_config(kimi.config, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"missing=\['norm.weight'\]"):
        head.load_weights({name: value for name, value in tensors.items() if name != "mtp.norm.weight"})
    with pytest.raises(ValueError, match=r"unknown=\['other.weight'\]"):
        head.load_weights({**tensors, "mtp.other.weight": torch.zeros(1)})
    with pytest.raises(
        ValueError, match=r"mtp.eh_proj.weight must have shape of an MTP head = \[32, 64\], got \[2, 2\]"
    ):
        head.load_weights({**tensors, "mtp.eh_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"mtp.self_attn.q_proj.weight"):
        head.load_weights({name: value for name, value in tensors.items() if "q_proj" not in name})
    assert not any(value.any() for value in head.state_dict().values()), "a refused file left something"


def test_heads_that_do_not_fit_the_model_are_refused(kimi: Any) -> None:
    config = EngineConfig(max_drafts=1)
    with pytest.raises(ValueError, match="head must have hidden_size 32, got 16"):
        Engine(kimi, config, MtpHead(16, 2, 16, 32, dtype=torch.float32))
    with pytest.raises(TypeError, match=r"head must be of torch\.float32 like the model, got torch\.bfloat16"):
        Engine(kimi, config, MtpHead(32, 2, 16, 32))
