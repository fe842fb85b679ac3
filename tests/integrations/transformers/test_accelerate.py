"""Accelerated transformers models against the untouched ones, and against themselves without padding and chunks."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.17")

from rapidkda import BackendUnavailable, ConfigConflict  # noqa: E402
from rapidkda.integrations.transformers import accelerate, restore  # noqa: E402
from rapidkda.testing.models import build_glm5_next, build_kimi_linear  # noqa: E402

SIZES = {"hidden_size": 64, "vocab_size": 97, "layers": 4}
BUILDERS = {
    "glm5_next": lambda **kw: build_glm5_next(3, **{**SIZES, **kw}),
    "kimi_linear": lambda **kw: build_kimi_linear(3, **{**SIZES, **kw}),
}
FAMILIES = list(BUILDERS)
BAR = 1e-4  # largest logit difference over the largest logit, float32


@pytest.fixture(autouse=True)
def torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are on the CPU, where torch is what `auto` takes; naming it keeps other backends' state out."""
    monkeypatch.setenv("RAPIDKDA_PREFILL_BACKEND", "torch")
    monkeypatch.setenv("RAPIDKDA_DECODE_BACKEND", "torch")


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    return {family: build() for family, build in BUILDERS.items()}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, built: dict[str, Any]) -> Iterator[Any]:
    yield built[request.param]
    restore(built[request.param])


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model: Any, ids: Tensor, mask: Tensor | None = None, cache: Any = None) -> tuple[Tensor, Any]:
    with torch.no_grad():
        out = model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    return out.logits, out.past_key_values


def in_chunks(model: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> tuple[Tensor, Any]:
    """Logits of all tokens, fed a chunk at a time through one cache."""
    logits, cache, done = [], None, 0
    for size in sizes:
        seen = None if mask is None else mask[:, : done + size]
        part, cache = run(model, ids[:, done : done + size], seen, cache)
        logits.append(part)
        done += size
    assert done == ids.shape[1]
    return torch.cat(logits, dim=1), cache


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def cache_error(got: Any, want: Any) -> float:
    """The largest relative error of any KDA layer's states; both caches have seen the same tokens."""
    worst, layers = 0.0, 0
    for ours, theirs in zip(got.layers, want.layers, strict=True):
        if hasattr(ours, "recurrent_states"):
            layers += 1
            worst = max(worst, error(ours.recurrent_states[0], theirs.recurrent_states[0]))
            worst = max(worst, error(ours.conv_states[0], theirs.conv_states[0]))
            assert ours.recurrent_states[0].dtype == torch.float32
    assert layers == 3
    return worst


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 3), (2, 64), (1, 77), (2, 130)])
def test_one_shot_prefill(model: Any, batch: int, length: int) -> None:
    ids = tokens(batch, length)
    want, want_cache = run(model, ids)
    accelerate(model)
    got, got_cache = run(model, ids)
    assert error(got, want) < BAR
    assert cache_error(got_cache, want_cache) < BAR
    with torch.no_grad():
        assert error(model(ids, use_cache=False).logits, want) < BAR


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "sizes",
    [[32, 32, 26], [1] + [2] * 4 + [81], [3, 1, 1, 1, 64, 5, 15], [85] + [1] * 5],
    ids=["prefill in chunks", "from one token", "mixed", "decode"],
)
def test_continuation_through_the_cache(model: Any, batch: int, sizes: list[int]) -> None:
    """Chunks, several tokens on a filled cache and single tokens, all against the untouched model in one shot."""
    ids = tokens(batch, 90)
    want, want_cache = run(model, ids)
    accelerate(model)
    got, got_cache = in_chunks(model, ids, sizes)
    assert error(got, want) < BAR
    assert cache_error(got_cache, want_cache) < BAR


def test_conversation_may_change_hands(model: Any) -> None:
    """The cache is transformers' own: either side continues what the other began."""
    ids = tokens(2, 60)
    want, _ = run(model, ids)
    logits, cache = [], None
    for turn, (start, end) in enumerate([(0, 20), (20, 37), (37, 38), (38, 39), (39, 41), (41, 60)]):
        if turn % 2:
            accelerate(model)
        else:
            restore(model)
        part, cache = run(model, ids[:, start:end], cache=cache)
        logits.append(part)
    assert error(torch.cat(logits, dim=1), want) < BAR


@pytest.mark.parametrize("sizes", [[40], [16, 16, 8], [37, 1, 1, 1]], ids=str)
def test_left_padded_batch_equals_its_rows(model: Any, sizes: list[int]) -> None:
    """Rows of 40, 33 and 3 tokens, left-padded to 40: each equals the untouched model on the row alone."""
    ids, lengths = tokens(3, 40), [40, 33, 3]
    mask = torch.tensor([[0] * (40 - n) + [1] * n for n in lengths])
    ids = ids * mask
    wants = [run(model, ids[row : row + 1, 40 - n :])[0] for row, n in enumerate(lengths)]
    accelerate(model)
    got, _ = in_chunks(model, ids, sizes, mask)
    for row, n in enumerate(lengths):
        assert error(got[row : row + 1, 40 - n :], wants[row]) < BAR


def test_padded_batch_equals_the_untouched_model(model: Any) -> None:
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :13] = 0
    ids = tokens(2, 40) * mask
    want, want_cache = run(model, ids, mask)
    accelerate(model)
    got, got_cache = run(model, ids, mask)
    assert error(got, want) < BAR  # padding positions included: both give the residual stream alone there
    assert cache_error(got_cache, want_cache) < BAR


def filled_cache_models() -> dict[str, Any]:
    """Attention layers that themselves skip padding after a filled cache: pools of one token in GLM's indexer (larger
    pools would count the padding), and every position attended."""
    return {"glm5_next": BUILDERS["glm5_next"](index_kpool=1), "kimi_linear": BUILDERS["kimi_linear"]()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before", [2, 24])
def test_padding_on_a_filled_cache_changes_nothing(family: str, before: int) -> None:
    """5 padding and 10 real tokens after a cached prefix equal the 10 real tokens, states and later tokens included."""
    model = filled_cache_models()[family]
    ids = tokens(1, before + 12)
    want, want_cache = run(model, ids)
    accelerate(model)
    _, cache = run(model, ids[:, :before])
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids[:, before : before + 10]], dim=1)
    mask = torch.tensor([[1] * before + [0] * 5 + [1] * 10])
    got, cache = run(model, padded, mask, cache)
    assert error(got[:, 5:], want[:, before : before + 10]) < BAR
    for step in (10, 11):
        mask = torch.cat([mask, torch.ones(1, 1, dtype=torch.int64)], dim=1)
        got, cache = run(model, ids[:, before + step : before + step + 1], mask, cache)
        assert error(got, want[:, before + step : before + step + 1]) < BAR
    assert cache_error(cache, want_cache) < BAR


@pytest.mark.skipif(not transformers.__version__.startswith("5.17."), reason="a fact about transformers 5.17")
@pytest.mark.parametrize("family", FAMILIES)
def test_untouched_models_let_padding_into_a_filled_cache(family: str) -> None:
    """Why the test above cannot compare with the untouched model. When this fails, the documentation is out of date."""
    model = filled_cache_models()[family]
    ids = tokens(1, 34)
    want, _ = run(model, ids)
    _, cache = run(model, ids[:, :24])
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids[:, 24:]], dim=1)
    got, _ = run(model, padded, torch.tensor([[1] * 24 + [0] * 5 + [1] * 10]), cache)
    assert error(got[:, 5:], want[:, 24:]) > 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_of_different_lengths_on_a_filled_cache(family: str) -> None:
    """Rows of a batch get 0, 1, 2 and 9 new tokens in one forward pass: left-padded, right-padded and with a hole."""
    model = filled_cache_models()[family]
    ids, lengths = tokens(4, 40), [0, 1, 2, 9]
    wants = [run(model, torch.cat([ids[r, :20], ids[r, 20 : 20 + n]])[None])[1] for r, n in enumerate(lengths)]
    accelerate(model)
    places = [[], [9], [3, 8], [0, 1, 2, 3, 5, 6, 7, 8, 9]]
    turn, mask = torch.zeros(4, 10, dtype=torch.int64), torch.zeros(4, 10, dtype=torch.int64)
    for row, place in enumerate(places):
        turn[row, place] = ids[row, 20 : 20 + lengths[row]]
        mask[row, place] = 1
    _, cache = run(model, ids[:, :20])
    _, cache = run(model, turn, torch.cat([torch.ones(4, 20, dtype=torch.int64), mask], dim=1), cache)
    for row, want in enumerate(wants):
        first, theirs = cache.layers[0], want.layers[0]  # before any attention layer
        assert error(first.recurrent_states[0][row : row + 1], theirs.recurrent_states[0]) < BAR
        assert error(first.conv_states[0][row : row + 1], theirs.conv_states[0]) < BAR
    _, untouched = run(model, ids[:, :20])
    for ours, before in zip(cache.layers, untouched.layers, strict=True):
        if hasattr(ours, "recurrent_states"):  # the row without tokens keeps its states, bit for bit
            assert torch.equal(ours.recurrent_states[0][0], before.recurrent_states[0][0])
            assert torch.equal(ours.conv_states[0][0], before.conv_states[0][0])


def kda_layer(model: Any) -> Any:
    return next(module for module in model.modules() if hasattr(module, "forget_gate"))


def test_short_rows_fill_the_convolution_window(model: Any) -> None:
    """Left-padded rows with fewer tokens than the convolution is wide, then more of them, through a fresh cache."""
    accelerate(model)
    hidden = torch.randn(3, 6, SIZES["hidden_size"])
    layer = kda_layer(model)
    with torch.no_grad():
        for n in (0, 1, 2, 5):
            mask = torch.ones(3, 6, dtype=torch.bool)
            mask[1, : 6 - n] = False
            cache = transformers.DynamicCache(config=model.config)
            first = layer(hidden_states=hidden, cache_params=cache, attention_mask=mask)
            second = layer(hidden_states=hidden, cache_params=cache)
            want = layer(hidden_states=torch.cat([hidden[1:2, 6 - n :], hidden[1:2]], dim=1))
            assert error(torch.cat([first[1:2, 6 - n :], second[1:2]], dim=1), want) < BAR
            assert (first[1, : 6 - n] == 0).all()


def test_generate(model: Any) -> None:
    ids = tokens(2, 21)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    settings: list[dict[str, Any]] = [
        {"do_sample": False},
        {"do_sample": False, "cache_implementation": "static"},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "prefill_chunk_size": 8},
    ]
    for options in settings:
        run_it = dict(attention_mask=mask, max_new_tokens=12, pad_token_id=0, **options)
        restore(model)
        want = model.generate(ids * mask, **run_it)
        accelerate(model)
        assert torch.equal(model.generate(ids * mask, **run_it), want), options
        assert want.shape == (2, 33)


def test_unbounded_gate_of_glm() -> None:
    model = BUILDERS["glm5_next"](lower_bound=None)
    ids = tokens(2, 70)
    want, _ = run(model, ids)
    accelerate(model)
    assert error(in_chunks(model, ids, [50, 19, 1])[0], want) < BAR


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_no_less_accurate_than_the_untouched_model(family: str) -> None:
    """Against float32 with the same weights. Two experts of two: no discrete choice that rounding could flip."""
    model = BUILDERS[family](dtype=torch.bfloat16, experts=2)
    exact = copy.deepcopy(model).float()
    ids = tokens(2, 100)
    truth, _ = run(exact, ids)
    untouched = in_chunks(model, ids, [64, 35, 1])[0]
    report = accelerate(model)
    got, cache = in_chunks(model, ids, [64, 35, 1])
    assert got.dtype == torch.bfloat16
    assert cache.layers[0].conv_states[0].dtype == torch.bfloat16
    assert report.prefill.name == "torch"

    def distance(logits: Tensor) -> float:
        return float((logits.double() - truth.double()).norm() / truth.double().norm())

    assert 0 < distance(got) < 1.1 * distance(untouched) < 0.1


def test_gradients_equal_the_untouched_models(model: Any) -> None:
    ids = tokens(2, 48)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    labels = torch.where(mask.bool(), ids, -100)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    want = gradients()
    accelerate(model)
    got = gradients()
    model.zero_grad()
    assert got.keys() == want.keys()
    assert any("forget_gate.A_log" in name for name in got)
    for name in want:
        assert error(got[name], want[name]) < 1e-3, name


def test_gradients_do_not_break_the_cache(model: Any) -> None:
    """A cache used outside `no_grad`, as interactive sessions do."""
    ids = tokens(2, 30)
    want, _ = run(model, ids)
    accelerate(model)
    first = model(ids[:, :20], use_cache=True)
    second = model(ids[:, 20:29], past_key_values=first.past_key_values)
    third = model(ids[:, 29:], past_key_values=first.past_key_values)
    got = torch.cat([first.logits, second.logits, third.logits], dim=1)
    assert got.requires_grad
    assert error(got.detach(), want) < BAR


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q"])
@pytest.mark.parametrize("grad", [False, True])
def test_packed_sequences(model: Any, name: str, grad: bool) -> None:
    accelerate(model)
    layer, hidden = kda_layer(model), torch.randn(1, 50, SIZES["hidden_size"])
    ends = torch.tensor([0, 17, 17, 20, 50], dtype=torch.int32)
    with torch.set_grad_enabled(grad):
        got = layer(hidden_states=hidden, **{name: ends})
        alone = [layer(hidden_states=hidden[:, a:b]) for a, b in ((0, 17), (17, 20), (20, 50))]
        assert error(got.detach(), torch.cat(alone, dim=1).detach()) < BAR
        with pytest.raises(ValueError, match=r"cu_seqlens.*batch of 2"):
            layer(hidden_states=hidden.view(2, 25, -1), **{name: ends})
        with pytest.raises(ValueError, match=r"cu_seqlens.*end at the 50 tokens"):
            layer(hidden_states=hidden, **{name: ends[:-1]})
        cache = transformers.DynamicCache(config=model.config)
        with pytest.raises(ValueError, match=r"cu_seqlens.*use_cache=False"):
            layer(hidden_states=hidden, cache_params=cache, **{name: ends})


def test_mask_is_read_again_after_it_changes(model: Any) -> None:
    accelerate(model)
    layer, hidden = kda_layer(model), torch.randn(1, 9, SIZES["hidden_size"])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            mask = torch.ones(1, 9, dtype=torch.bool)
            whole = layer(hidden_states=hidden, attention_mask=mask)
            assert torch.equal(layer(hidden_states=hidden, attention_mask=mask), whole)
            mask[0, :4] = False
            got = layer(hidden_states=hidden, attention_mask=mask)
            assert error(got[:, 4:], layer(hidden_states=hidden[:, 4:])) < BAR
            with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, T\] = \[1, 9\]"):
                layer(hidden_states=hidden, attention_mask=mask[:, 1:])


def test_inference_mode_then_training(model: Any) -> None:
    """Index tensors made in inference mode, and kept, must not end up in a graph."""
    accelerate(model)
    layer, hidden = kda_layer(model), torch.randn(2, 23, SIZES["hidden_size"])
    padded = torch.ones(2, 23, dtype=torch.bool)
    padded[1, :5] = False
    for mask in (None, padded):
        with torch.inference_mode():
            want = layer(hidden_states=hidden, attention_mask=mask)
        got = layer(hidden_states=hidden, attention_mask=mask)
        got.sum().backward()
        layer.zero_grad()
        assert error(got.detach(), want) < BAR


def test_a_forward_of_nothing_but_padding(model: Any) -> None:
    accelerate(model)
    layer, hidden = kda_layer(model), torch.randn(2, 7, SIZES["hidden_size"])
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    for grad in (False, True):
        cache = transformers.DynamicCache(config=model.config)
        with torch.set_grad_enabled(grad):
            want = layer(hidden_states=hidden)
            padding = torch.full((2, 5, SIZES["hidden_size"]), float("nan"))  # what attention makes of padding
            for _ in range(2):
                got = layer(hidden_states=padding, cache_params=cache, attention_mask=nothing)
                assert (got == 0).all()
            first = layer(hidden_states=hidden[:, :4], cache_params=cache)
            layer(hidden_states=padding, cache_params=cache, attention_mask=nothing)
            second = layer(hidden_states=hidden[:, 4:], cache_params=cache)
        assert error(torch.cat([first, second], dim=1).detach(), want.detach()) < BAR


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_block_keeps_the_layer_in_its_graph(model: Any, compiler: None) -> None:
    """A whole decoder layer, without a break: one shot, several tokens on a filled cache, single tokens."""
    block = next(m for m in model.modules() if kda_layer(model) in m.children())
    streams = (model.config.get_text_config().hc_mult,) if model.config.model_type == "glm5_next" else ()
    hidden = torch.randn(1, 20, *streams, SIZES["hidden_size"])

    def output(function: Any) -> Tensor:
        cache = transformers.DynamicCache(config=model.config)
        parts = [function(hidden[:, a:b], past_key_values=cache) for a, b in ((0, 12), (12, 18), (18, 19), (19, 20))]
        return torch.cat([part[0] if isinstance(part, tuple) else part for part in parts], dim=1)

    with torch.no_grad():
        want = output(block)
        accelerate(model)
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        assert error(output(compiled), want) < BAR


def test_compiled_model_equals_itself_uncompiled(built: dict[str, Any], compiler: None) -> None:
    """A left-padded batch: prefill, a chunk on the filled cache, single tokens; logits and caches."""
    model = built["kimi_linear"]
    ids = tokens(2, 44)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    sizes = [32, 10, 1, 1]
    accelerate(model)
    try:
        want, want_cache = in_chunks(model, ids, sizes, mask)
        got, got_cache = in_chunks(torch.compile(model, backend="aot_eager"), ids, sizes, mask)
    finally:
        restore(model)
    assert error(got[mask.bool()], want[mask.bool()]) < BAR
    assert cache_error(got_cache, want_cache) < BAR


@pytest.mark.parametrize("cached", [None, 0, 40], ids=["no cache", "empty cache", "filled cache"])
def test_no_graph_break_beyond_those_of_the_untouched_model(
    built: dict[str, Any], cached: int | None, compiler: None
) -> None:
    """Kimi-Linear has none; GLM breaks at its sparse attention and its experts, which are not rapidkda's."""
    model = built["kimi_linear"]
    accelerate(model)
    try:
        with torch.no_grad():
            cache = None if cached is None else transformers.DynamicCache(config=model.config)
            if cached:
                model(tokens(2, cached), past_key_values=cache)
            ids = tokens(2, 1 if cached else 40)
            found = torch._dynamo.explain(model)(ids, past_key_values=cache, use_cache=cache is not None)
    finally:
        restore(model)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


def test_compiled_training_steps_around_the_layer(model: Any, compiler: None) -> None:
    block = next(m for m in model.modules() if kda_layer(model) in m.children())
    streams = (model.config.get_text_config().hc_mult,) if model.config.model_type == "glm5_next" else ()
    hidden = torch.randn(1, 20, *streams, SIZES["hidden_size"])

    def gradient(function: Any) -> Tensor:
        x = hidden.clone().requires_grad_()
        out = function(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        assert x.grad is not None
        return x.grad

    want = gradient(block)
    accelerate(model)
    assert error(gradient(torch.compile(block, backend="aot_eager")), want) < 1e-3


def test_restore_is_exact(model: Any) -> None:
    ids = tokens(2, 33)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    want, want_cache = run(model, ids)
    report = accelerate(model)
    assert len(report.layers) == 3
    assert not torch.equal(run(model, ids)[0], want)
    assert restore(model) == 3
    got, cache = run(model, ids)
    assert torch.equal(got, want)
    assert cache_error(cache, want_cache) == 0.0
    assert {name: vars(module).keys() for name, module in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }
    assert restore(model) == 0


def test_accelerate_is_idempotent(model: Any) -> None:
    ids = tokens(1, 33)
    first = accelerate(model)
    want, _ = run(model, ids)
    assert accelerate(model) == first
    assert torch.equal(run(model, ids)[0], want)
    assert restore(model) == 3
    assert restore(model) == 0


def test_auto_says_why_it_passed_others_over(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAPIDKDA_PREFILL_BACKEND")
    monkeypatch.delenv("RAPIDKDA_DECODE_BACKEND")
    report = accelerate(model)
    for choice in (report.prefill, report.decode):
        assert (choice.name, choice.source) == ("torch", "auto")
        assert set(choice.passed_over) == {"cuda", "triton", "flashkda"}
    ids = tokens(1, 20)
    got, _ = in_chunks(model, ids, [12, 7, 1])
    restore(model)
    assert error(got, run(model, ids)[0]) < BAR


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved after it was accelerated: bfloat16 against float32, on the fastest backends of the GPU."""
    monkeypatch.delenv("RAPIDKDA_PREFILL_BACKEND")
    monkeypatch.delenv("RAPIDKDA_DECODE_BACKEND")
    model = BUILDERS[family](dtype=torch.bfloat16, experts=2).cuda()
    ids = tokens(2, 300).cuda()
    truth, _ = run(copy.deepcopy(model).float(), ids)
    untouched = in_chunks(model, ids, [200, 97, 1, 1, 1])[0]
    model.cpu()
    accelerate(model)
    got = in_chunks(model.cuda(), ids, [200, 97, 1, 1, 1])[0]
    distance = [float((x.double() - truth.double()).norm() / truth.double().norm()) for x in (got, untouched)]
    assert 0 < distance[0] < 1.2 * distance[1] < 0.1


def test_report_says_what_and_why(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAPIDKDA_DECODE_BACKEND")
    report = accelerate(model, backend="torch", decode_backend="torch")
    assert report.family in ("glm5_next", "kimi_linear")
    assert report.layers[0].endswith("layers.0.self_attn")
    assert (report.prefill.name, report.prefill.source) == ("torch", "argument backend")
    assert report.family in str(report)
    assert "3 KDA layers" in str(report)
    assert "torch" in str(report)


def test_only_this_model_changes(model: Any) -> None:
    other = copy.deepcopy(model)
    forward = type(kda_layer(model)).forward
    accelerate(model)
    assert type(kda_layer(model)).forward is forward
    assert "forward" not in vars(kda_layer(other))
    assert "forward" in vars(kda_layer(model))
    twin = copy.deepcopy(model)
    assert vars(kda_layer(twin))["forward"].__self__.module is kda_layer(twin)
    assert restore(twin) == 3
    assert "forward" in vars(kda_layer(model))


def test_accelerated_model_saves_as_before(model: Any, tmp_path: Any) -> None:
    keys = set(model.state_dict())
    accelerate(model)
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert restore(loaded) == 0
    accelerate(loaded)
    ids = tokens(1, 20)
    assert error(run(loaded, ids)[0], run(model, ids)[0]) < 1e-6


class Hook:
    """What the accelerate library attaches to modules whose weights live elsewhere."""

    def __init__(self) -> None:
        self.loaded = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.loaded += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output


def attach(module: Any, hook: Hook) -> None:
    module._hf_hook, module._old_forward = hook, module.forward

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._hf_hook.pre_forward(self, *args, **kwargs)
        return self._hf_hook.post_forward(self, self._old_forward(*args, **kwargs))

    module.forward = MethodType(hooked, module)


@pytest.mark.parametrize("hooks_first", [True, False])
def test_offloading_hooks_still_fire(family: str, hooks_first: bool) -> None:
    model = BUILDERS[family]()
    ids = tokens(1, 20)
    want, _ = run(model, ids)
    layer = kda_layer(model)
    hooks = {name: Hook() for name in ("", "conv1d", "forget_gate", "o_norm", "q_proj")}
    if not hooks_first:
        accelerate(model)
    for name, hook in hooks.items():
        attach(layer.get_submodule(name), hook)
    if hooks_first:
        accelerate(model)
    got, _ = run(model, ids)
    assert error(got, want) < BAR
    assert not torch.equal(got, want)
    assert {name: hook.loaded for name, hook in hooks.items()} == dict.fromkeys(hooks, 1)
    assert restore(model) == 3
    assert torch.equal(run(model, ids)[0], want)
    assert {name: hook.loaded for name, hook in hooks.items()} == dict.fromkeys(hooks, 2)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def device_map(model: Any, devices: list[str | int]) -> dict[str, str | int]:
    """Decoder layers on the devices in turn, everything else on the first."""
    layers = next(
        m for m in model.modules() if isinstance(m, nn.ModuleList) and kda_layer(model) in list(m[0].children())
    )
    names = {module: name for name, module in model.named_modules()}
    found = {names[block]: devices[i % len(devices)] for i, block in enumerate(layers)}
    for name, _ in model.named_parameters():
        if not name.startswith(f"{names[layers]}."):
            found[name.rsplit(".", 1)[0]] = devices[0]
    return found


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(["cpu", "cpu"], id="cpu"),
        pytest.param([0, "cpu"], id="gpu and cpu", marks=pytest.mark.gpu),
        pytest.param([0, 1], id="two gpus", marks=[pytest.mark.gpu, TWO_GPUS]),
    ],
)
@pytest.mark.parametrize("accelerate_first", [False, True])
def test_device_map_splits(family: str, devices: list[str | int], accelerate_first: bool) -> None:
    """Layers on several devices, or loaded from the CPU when their turn comes, give what one device gives."""
    hooks = pytest.importorskip("accelerate", reason="the accelerate library splits models")
    model = BUILDERS[family]()
    ids = tokens(2, 21)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want, want_tokens = run(model, ids)[0], model.generate(ids, **options)
    if accelerate_first:
        accelerate(model)
    hooks.dispatch_model(model, device_map(model, devices), main_device=devices[0], force_hooks=True)
    if not accelerate_first:
        accelerate(model)
    ids = ids.to(devices[0])
    assert error(in_chunks(model, ids, [17, 3, 1])[0].cpu(), want) < BAR
    options["attention_mask"] = mask.to(devices[0])
    assert torch.equal(model.generate(ids, **options).cpu(), want_tokens)
    assert restore(model) == 3
    assert error(run(model, ids)[0].cpu(), want) < BAR


def test_a_replaced_forward_comes_back(model: Any) -> None:
    layer = kda_layer(model)
    own = MethodType(type(layer).forward, layer)
    layer.forward = own
    try:
        accelerate(model)
        assert vars(layer)["forward"] is not own
        restore(model)
        assert vars(layer)["forward"] is own
    finally:
        del layer.forward


def test_wrong_calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        accelerate("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got NoneType"):
        restore(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model must have KDA layers.*got Linear"):
        accelerate(nn.Linear(2, 2))
    with pytest.raises(ConfigConflict, match="RAPIDKDA_PREFILL_BACKEND"):
        accelerate(model, backend="cuda")
    monkeypatch.delenv("RAPIDKDA_PREFILL_BACKEND")
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*torch.*got 'fastest'"):
        accelerate(model, backend="fastest")
    with pytest.raises(TypeError, match="backend must be a backend name"):
        accelerate(model, backend=3)  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailable, match="cuda"):
        accelerate(model, backend="cuda")
    assert restore(model) == 0, "an error must change nothing"


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "6.0.0", "7.1", "unknown"])
def test_unsupported_transformers(model: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(RuntimeError, match=f"transformers >= 5.17 and < 6.0, found {version}"):
        accelerate(model)
    assert restore(model) == 0


def test_missing_transformers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeError, match=r"transformers >= 5.17 and < 6.0 must be installed \(pip install"):
        accelerate(model)


def test_unknown_layer_is_refused(family: str) -> None:
    model = BUILDERS[family]()
    layer = kda_layer(model)
    layer.forget_gate.decay = layer.forget_gate.A_log
    del layer.forget_gate.A_log
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn of transformers .* lacks forget_gate\.A_log"):
        accelerate(model)
    model = BUILDERS[family]()
    kda_layer(model).activation = "gelu"
    with pytest.raises(ValueError, match="activation 'silu', got 'gelu'"):
        accelerate(model)
    assert restore(model) == 0
    model = BUILDERS["glm5_next"](lower_bound=-6.0)
    with pytest.raises(ValueError, match=r"lower bound in \[-5, 0\) or none, got -6.0"):
        accelerate(model)


def test_importing_does_not_import_transformers() -> None:
    code = (
        "import sys, rapidkda, rapidkda.integrations.transformers, rapidkda.testing.models\n"
        "sys.exit('transformers' in sys.modules or 'torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_of_the_integration_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[3] / "docs" / "integrations" / "transformers.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    assert names["text"].shape == (1, 220)
    assert "3 KDA layers of kimi_linear" in capsys.readouterr().out
