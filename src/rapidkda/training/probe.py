"""A small held-out set that shows during training what the model can do, in one pass of a batch's shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import tasks
from .forward import TrainingForward
from .model import END

SHARES = {"needles": 6, "arithmetic": 6, "copy": 2, "text": 2}  # sixteenths of the rows


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Rows of held-out samples.

    Attributes:
        tokens: [B, T], int64.
        spans: answers of each task as (row, first token, end).
        rows: which rows hold which kind.
    """

    tokens: Tensor
    spans: dict[str, list[tuple[int, int, int]]]
    rows: dict[str, slice]

    @torch.no_grad()
    def measure(self, forward: TrainingForward) -> dict[str, float]:
        """Mean loss of each kind's tokens, share of answers right in every token, and the MTP head's share on text.

        A answer counts as right when every token is the most likely one after the right tokens before it, which is
        when greedy generation gives the whole answer.
        """
        with torch.enable_grad():  # the mode that the compiled functions know
            hidden = forward.hidden(self.tokens)
            following = self.tokens.roll(-1, 1)
            loss, right = forward.losses(hidden, following.reshape(-1))
            _, ahead = forward.losses(forward.ahead(hidden, following), self.tokens.roll(-2, 1).reshape(-1))
        shape = self.tokens.shape
        losses, hits, drafts = (x.detach().float().view(shape).cpu() for x in (loss, right, ahead))
        found: dict[str, float] = {}
        for kind, rows in self.rows.items():
            found[f"loss_{kind}"] = float(losses[rows, :-1].mean())
        for task, spans in self.spans.items():
            good = [bool(hits[r, start - 1 : end - 1].all()) for r, start, end in spans]
            found[f"right_{task}"] = sum(good) / len(good)
            found[f"answer_loss_{task}"] = float(np.mean([losses[r, a - 1 : b - 1].mean() for r, a, b in spans]))
        found["right_mtp_text"] = float(drafts[self.rows["text"], :-2].mean())
        return found


def build(batch_tokens: int, length: int, device: torch.device) -> Probe:
    """The probe for batches of [batch_tokens // length, length], with 36 needles where they fit."""
    count = batch_tokens // length
    tokens = np.full((count, length), END, np.uint8)
    spans: dict[str, list[tuple[int, int, int]]] = {task: [] for task in tasks.TASKS}
    rows: dict[str, slice] = {}
    first = 0
    for kind, share in SHARES.items():
        last = min(count, first + max(1, count * share // sum(SHARES.values())))
        rows[kind] = slice(first, last)
        seed = 0
        for row in range(first, last):
            place = 0
            while place < length:
                text, answers = _sample(kind, seed, length)
                seed += 1
                piece = np.frombuffer(text[: length - place], np.uint8)
                tokens[row, place : place + len(piece)] = piece
                spans.get(kind, []).extend(
                    (row, place + a.start, place + a.end) for a in answers if place + a.end < length
                )
                place += len(piece) + 1
        first = last
    return Probe(torch.from_numpy(tokens).long().to(device), spans, rows)


def _sample(kind: str, seed: int, length: int) -> tuple[bytes, tuple[tasks.Answer, ...]]:
    if kind == "text":
        text = tasks.held_out_text()
        start = seed * length % (len(text) - length)
        return text[start : start + length].encode("latin-1"), ()
    if kind == "needles":
        count = min(tasks.NEEDLES, tasks.most_needles(length))
        sample = tasks.needles(seed, "test", length=length, count=count)
    elif kind == "arithmetic":
        sample = tasks.arithmetic(seed, "test")
    else:
        sample = tasks.copy(seed, "test", length=min(1024, length // 2))
    return sample.tokens, sample.answers
