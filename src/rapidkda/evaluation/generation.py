"""What the embedded engine writes: how long greedy continuations agree, and what speculation brings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import Engine, EngineConfig, MtpHead, RequestResult, SamplingParams
from ..serving import BackendWish
from ..training.tasks import held_out_text
from .statistics import Estimate, share

WARM_UP = 8  # tokens

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy continuations against the reference's.

    Attributes:
        tokens: of each continuation.
        lengths: leading tokens that are the same, one entry a prompt.
        whole: share of continuations that are the same throughout.
    """

    tokens: int
    lengths: tuple[int, ...]
    whole: Estimate


@dataclass(frozen=True, slots=True)
class Speculation:
    """Greedy continuation of held-out text with K drafts of the MTP head a step.

    Attributes:
        drafts: K; 0 is plain decoding.
        accepted: share of draft tokens that were accepted; None for K = 0.
        tokens_per_step: output tokens of a request in one of its steps, the prefill's included.
        tokens_per_s: output tokens of all requests by the wall clock of the whole generation, prefill included.
        same: share of continuations that are those of K = 0 to the last token.
    """

    drafts: int
    accepted: Estimate | None
    tokens_per_step: float
    tokens_per_s: float
    same: Estimate


def text_prompts(count: int, length: int) -> list[Tokens]:
    """Windows of the held-out text at even distances."""
    text = held_out_text().encode("latin-1")
    return [tuple(text[start : start + length]) for start in (n * (len(text) - length) // count for n in range(count))]


def continue_all(
    model: Any,
    backends: BackendWish,
    prompts: Sequence[Tokens],
    tokens: int,
    *,
    chunk: int,
    head: MtpHead | None = None,
    drafts: int = 0,
    warm_up: int = 0,
) -> tuple[list[RequestResult], float]:
    """Greedy continuations of all prompts at once, and the seconds that they took; `warm_up` tokens go before."""
    config = EngineConfig(
        max_num_batched_tokens=chunk + (1 + drafts) * len(prompts),
        max_num_seqs=len(prompts),
        prefill_chunk=chunk,
        max_drafts=drafts,
        backends=backends,
    )
    engine = Engine(model, config, "lookup" if head is None else head)
    if warm_up:
        engine.generate(prompts, SamplingParams(max_new_tokens=warm_up))
    start = time.perf_counter()
    results = engine.generate(prompts, SamplingParams(max_new_tokens=tokens))
    seconds = time.perf_counter() - start
    broken = next((result.error for result in results if result.error is not None), None)
    if broken is not None:
        raise RuntimeError(f"the engine ended a continuation: {broken}")
    return results, seconds


def agreement(continuations: Sequence[Tokens], reference: Sequence[Tokens]) -> Agreement:
    """Compare continuations of the same prompts."""
    lengths = [_common(mine, theirs) for mine, theirs in zip(continuations, reference, strict=True)]
    tokens = len(reference[0])
    return Agreement(tokens, tuple(lengths), share([length == tokens for length in lengths]))


def speculation(
    model: Any,
    head: MtpHead,
    backends: BackendWish,
    prompts: Sequence[Tokens],
    tokens: int,
    *,
    chunk: int,
    counts: Sequence[int] = (0, 1, 3),
) -> list[Speculation]:
    """One entry for each K of `counts`, of which the first is 0."""
    found: list[Speculation] = []
    plain: list[Tokens] = []
    for drafts in counts:
        results, seconds = continue_all(
            model, backends, prompts, tokens, chunk=chunk, head=head, drafts=drafts, warm_up=WARM_UP
        )
        written = [result.tokens for result in results]
        plain = plain or written
        stats = [result.stats for result in results]
        drafted, accepted = sum(one.drafted for one in stats), sum(one.accepted for one in stats)
        total = sum(one.output_tokens for one in stats)
        found.append(
            Speculation(
                drafts=drafts,
                accepted=share([True] * accepted + [False] * (drafted - accepted)) if drafted else None,
                tokens_per_step=total / sum(one.steps for one in stats),
                tokens_per_s=total / seconds,
                same=agreement(written, plain).whole,
            )
        )
    return found


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    return next((place for place, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
