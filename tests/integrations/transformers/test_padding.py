"""Padding changes nothing, wherever it stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapidkda.integrations.transformers import accelerate

from .support import BAR, BUILDERS, SIZES, cache_error, error, in_chunks, kda_layer, run, tokens

transformers = pytest.importorskip("transformers", minversion="5.17")


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
def test_untouched_models_let_padding_into_a_filled_cache(family: str) -> None:
    """Why the test above cannot compare with the untouched model. When this fails, the documentation is out of date."""
    model = filled_cache_models()[family]
    ids = tokens(1, 34)
    want, _ = run(model, ids)
    _, cache = run(model, ids[:, :24])
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids[:, 24:]], dim=1)
    got, _ = run(model, padded, torch.tensor([[1] * 24 + [0] * 5 + [1] * 10]), cache)
    assert error(got[:, 5:], want[:, 24:]) > 0.5


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
