"""Scoring reads a text as the untouched model does, whatever the schedule and the rollback."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rapidkda.dispatch import check_name, guest, load
from rapidkda.evaluation.operands import NarrowOperands, Recording
from rapidkda.evaluation.scoring import DECODE, MIXED, VERIFY, Move, Passage, Scorer
from rapidkda.serving import BackendWish

TEXT = tuple(random.Random(0).randrange(1, 255) for _ in range(90))
TORCH = BackendWish(prefill="torch", decode="torch")


@torch.no_grad()
def untouched(model: Any, text: tuple[int, ...]) -> torch.Tensor:
    return torch.log_softmax(model(input_ids=torch.tensor([text])).logits[0, :-1].float(), -1)


@pytest.mark.parametrize("rollback", ["replay", "slots"])
@pytest.mark.parametrize("moves", [DECODE, VERIFY, MIXED, (Move("verify", 1, 3), Move("decode"))], ids=str)
def test_any_schedule_scores_as_the_untouched_model(small: Any, moves: tuple[Move, ...], rollback: Any) -> None:
    passages = [Passage(TEXT, prefill, moves) for prefill in (1, 40, 89, 90)] + [Passage(TEXT[:30], 17, moves)]
    scorer = Scorer(small, TORCH, chunk=13, max_tokens=50, max_passages=3, rollback=rollback)
    for passage, scored in zip(passages, scorer.score(passages)):
        want = untouched(small, passage.tokens)
        torch.testing.assert_close(scored.logprobs, want, atol=1e-4, rtol=1e-4)
        assert scored.targets.tolist() == list(passage.tokens[1:])
        assert scored.kinds[: passage.prefill - 1] == ("prefill",) * (passage.prefill - 1)
        assert set(scored.kinds[passage.prefill :]) <= {move.kind for move in moves}


def test_only_the_positions_that_are_asked_for(small: Any) -> None:
    scorer = Scorer(small, TORCH, chunk=16, max_tokens=64, max_passages=2)
    (scored,) = scorer.score([Passage(TEXT, 50, MIXED, scored=(3, 48, 49, 50, 77))])
    torch.testing.assert_close(scored.logprobs, untouched(small, TEXT)[[3, 48, 49, 50, 77]], atol=1e-4, rtol=1e-4)
    assert scored.targets.tolist() == [TEXT[place + 1] for place in (3, 48, 49, 50, 77)]


@pytest.mark.parametrize(("tokens", "prefill"), [((1,), 1), (TEXT, 0), (TEXT, 91)])
def test_a_passage_that_cannot_be_scored(small: Any, tokens: tuple[int, ...], prefill: int) -> None:
    with pytest.raises(ValueError, match="passage 0 must hold 2 tokens or more and prefill 1 to all of them, got"):
        Scorer(small, TORCH, max_passages=1).score([Passage(tokens, prefill)])


def test_narrow_operands_round_the_operator_and_nothing_else(small: Any) -> None:
    plain = load("torch")
    recording = Recording("seen-here", plain)
    narrow = NarrowOperands("narrow-here", recording, recording, plain)
    passage = [Passage(TEXT, 60, MIXED)]
    with guest(narrow) as name:
        wish = BackendWish(prefill=name, decode=name)
        scored = Scorer(small, wish, chunk=64).score(passage)[0].logprobs
    assert {x.dtype for seen in recording.seen for x in (seen.q, seen.k, seen.v, seen.g, seen.beta)} == {torch.bfloat16}
    difference = (scored - untouched(small, TEXT)).abs().mean()
    assert 1e-5 < difference < 3e-2, "rounded, and right"


def test_a_guest_is_known_while_it_is_entered() -> None:
    first, second = (Recording("a-guest", load("torch")) for _ in range(2))
    with guest(first) as name, guest(second) as other:
        assert load(name) is first
        assert load(other) is second
        assert check_name(name, "backend") == name
    with pytest.raises(KeyError):
        load(name)
    with pytest.raises(ValueError, match="backend must be one of auto, cuda"):
        check_name(name, "backend")
