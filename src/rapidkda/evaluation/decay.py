"""Half-lives of what the model's heads remember, on real text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import reference
from ..backends.base import Backend
from ..dispatch import guest
from ..problem import Tokens
from ..serving import BackendWish
from .operands import Recording
from .scoring import Passage, Scorer


@dataclass(frozen=True, slots=True)
class HalfLives:
    """One head's.

    Attributes:
        layer: index of the decoder layer.
        head: value head.
        tokens: half-life of each key channel, ascending, in tokens: ln 2 over the mean decay of the text.
    """

    layer: int
    head: int
    tokens: tuple[float, ...]


def record(model: Any, backend: Backend, tokens: Sequence[int]) -> dict[int, Tokens]:
    """What the operator of each KDA layer sees when a text is prefilled at once, by decoder layer."""
    recording = Recording(f"recorded-{backend.name}", backend)
    with guest(recording) as name:
        wish = BackendWish(prefill=name, decode=name)
        scorer = Scorer(model, wish, chunk=len(tokens), max_tokens=max(8, len(tokens)), max_passages=1)
        scorer.score([Passage(tuple(tokens), len(tokens), scored=(len(tokens) - 2,))])
    return dict(zip(scorer.model.kda, recording.seen, strict=True))


def half_lives(seen: dict[int, Tokens]) -> list[HalfLives]:
    """Of every head of the recorded layers."""
    found = []
    for layer, tokens in seen.items():
        gate = tokens.gate
        decay = tokens.g.double()
        if gate.kind != "log_decay":
            decay = reference.gate_log_decay(decay, gate.A_log, gate.dt_bias, gate.lower_bound)
        rates = -decay.mean(0)  # [HV, K]
        lives = (math.log(2) / rates.clamp_min(torch.finfo(torch.float32).tiny)).sort(-1).values.tolist()
        found += [HalfLives(layer, head, tuple(one)) for head, one in enumerate(lives)]
    return found
