"""Log-probabilities of held-out text, a candidate's against the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..training.tasks import held_out_text
from .scoring import DECODE, KINDS, VERIFY, Kind, Move, Passage, Scored, Scorer
from .statistics import Estimate, mean, share

EDGES = tuple(float(edge) for edge in np.logspace(-7, 1, 65))  # of the histogram of |delta logprob|


@dataclass(frozen=True, slots=True)
class Spans:
    """How each passage is fed: tokens that are prefilled, then decoded, then verified."""

    prefill: int
    decode: int
    verify: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.verify + 1  # the last token is only predicted


@dataclass(frozen=True, slots=True)
class Drift:
    """How far log-probabilities are from the reference's, over the tokens of one kind of step or of all.

    Attributes:
        kind: of step, or "all".
        tokens: how many.
        mean_abs: of the difference in the log-probability of the text's next token, in nats.
        max_abs: its largest.
        kl: divergence of the candidate's distribution from the reference's, nats a token.
        changed: share of tokens whose most likely successor is another.
        histogram: tokens by |difference|, between `EDGES`; those below and above are in the first and last.
    """

    kind: Kind | str
    tokens: int
    mean_abs: Estimate
    max_abs: float
    kl: Estimate
    changed: Estimate
    histogram: tuple[int, ...] = field(repr=False)


def text_passages(count: int, spans: Spans, whole: bool = False) -> list[Passage]:
    """Passages of the held-out text at even distances; `whole` prefills all of each.

    Raises ValueError when the text is too short for them.
    """
    text = held_out_text().encode("latin-1")
    if spans.total > len(text):
        raise ValueError(f"spans must be at most {len(text)} tokens together, the held-out text, got {spans.total}")
    starts = [n * (len(text) - spans.total) // max(1, count - 1) for n in range(count)]
    return [_passage(tuple(text[start : start + spans.total]), spans, whole) for start in starts]


def _passage(tokens: tuple[int, ...], spans: Spans, whole: bool) -> Passage:
    if whole:
        return Passage(tokens, len(tokens))
    return Passage(tokens, spans.prefill, (*DECODE * spans.decode, *_verifies(spans.verify)))


def _verifies(tokens: int) -> list[Move]:
    """Verify steps that accept this many tokens together."""
    moves: list[Move] = []
    while tokens > 0:
        move = VERIFY[len(moves) % len(VERIFY)]
        moves.append(Move("verify", min(move.right, tokens), move.wrong))
        tokens -= move.right
    return moves


def drifts(scored: Sequence[Scored], reference: Sequence[Scored]) -> list[Drift]:
    """Of all tokens, then of each kind of step that the candidate took."""
    columns: list[np.ndarray] = []
    kinds: list[Kind] = []
    for mine, theirs in zip(scored, reference, strict=True):
        picked = theirs.targets[:, None]
        delta = (mine.logprobs.gather(1, picked) - theirs.logprobs.gather(1, picked))[:, 0]
        divergence = (theirs.logprobs.exp() * (theirs.logprobs - mine.logprobs)).double().sum(-1)
        changed = mine.logprobs.argmax(-1) != theirs.logprobs.argmax(-1)
        columns.append(torch.stack([delta.double().abs(), divergence, changed.double()]).cpu().numpy())
        kinds += mine.kinds
    table = np.concatenate(columns, axis=1)
    named = np.array(kinds)
    found = [_drift("all", table)]
    return found + [_drift(kind, table[:, named == kind]) for kind in KINDS if kind in kinds]


def _drift(kind: Kind | str, table: np.ndarray) -> Drift:
    delta, divergence, changed = table
    shown = np.clip(np.nan_to_num(delta, nan=EDGES[-1]), EDGES[0], EDGES[-1])
    return Drift(
        kind=kind,
        tokens=delta.size,
        mean_abs=mean(delta),
        max_abs=float(delta.max()) if np.isfinite(delta).all() else float("inf"),
        kl=mean(divergence),
        changed=share([bool(one) for one in changed]),
        histogram=tuple(int(n) for n in np.histogram(shown, EDGES)[0]),
    )


def score_text(scorer: Scorer, count: int, spans: Spans, whole: bool = False) -> list[Scored]:
    """The held-out passages."""
    return scorer.score(text_passages(count, spans, whole))
