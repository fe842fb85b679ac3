"""An accelerated model computes what the untouched one does: prefill, cache, generation, packed sequences."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from rapidkda.integrations.transformers import accelerate, restore

from .support import BAR, BUILDERS, SIZES, cache_error, error, in_chunks, kda_layer, run, tokens

transformers = pytest.importorskip("transformers", minversion="5.17")


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


def test_unbounded_gate_of_glm() -> None:
    model = BUILDERS["glm5_next"](lower_bound=None)
    ids = tokens(2, 70)
    want, _ = run(model, ids)
    accelerate(model)
    assert error(in_chunks(model, ids, [50, 19, 1])[0], want) < BAR


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


@pytest.mark.gpu
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
