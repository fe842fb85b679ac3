"""Packed rows: full, mixed as stated, weighted by what is asked for, and never the same twice."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from rapidkda.training import batches, tasks
from rapidkda.training.batches import KINDS, MIXTURE, STEP, Batches

TEXT = "".join(f"The number after {i} is {i + 1}.\n" for i in range(5000))


@pytest.mark.parametrize("length", [128, 512, 4096])
def test_rows_are_full_and_weights_follow_the_answers(length: int) -> None:
    seeds = itertools.count(5)
    needles = 0
    for _ in range(30):
        tokens, weights = batches.row(seeds, TEXT, length)
        assert tokens.shape == weights.shape == (length,)
        text = tokens.tobytes().decode("latin-1")
        answers = weights == int(STEP * batches.WEIGHTS["needles"][0])
        if tasks.RECALL in text:
            needles += 1
            asked = text.partition(tasks.RECALL)[2].partition("\0")[0]
            values = [part.split("=")[1][:4] for part in asked.split("[")[1:]]
            start = text.index(tasks.RECALL)
            found = tokens[start : start + len(tasks.RECALL) + len(asked)]
            marked = answers[start : start + len(tasks.RECALL) + len(asked)]
            assert found[marked].tobytes().decode() == "".join(values)
    assert needles > 2


def test_the_mixture_is_that_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(KINDS, 0)
    made = {name: getattr(batches, name) for name in ("_needles", "_other")}

    def counting(name: str):  # type: ignore[no-untyped-def]
        def make(*args: object) -> batches.Document:
            document: batches.Document = made[name](*args)
            counts[document.kind] += len(document.tokens)
            return document

        return make

    for name in made:
        monkeypatch.setattr(batches, name, counting(name))
    seeds = itertools.count(0)
    for _ in range(400):
        batches.row(seeds, TEXT, 2048)
    total = sum(counts.values())
    for kind, share in zip(KINDS, MIXTURE):
        assert counts[kind] / total == pytest.approx(share, abs=0.08), counts


def test_batches_differ_between_steps_workers_and_seeds_and_may_change_length(corpus: Path) -> None:
    def first(seed: int, workers: int, count: int) -> list[bytes]:
        stream = iter(Batches(corpus, tokens=1024, length=256, seed=seed, workers=workers))
        return [next(stream)[0].numpy().tobytes() for _ in range(count)]

    assert first(0, 0, 3) == first(0, 0, 3)
    everything = [*first(0, 2, 4), *first(1, 0, 2)]
    assert len(set(everything)) == len(everything)
    source = Batches(corpus, tokens=1024, length=256, seed=0, workers=0)
    stream = iter(source)
    assert next(stream)[0].shape == (4, 256)
    source.length = 512
    assert next(stream)[0].shape == (2, 512)


def test_unpacked_weights_are_those_of_the_table() -> None:
    raw = torch.tensor(np.array([[STEP, 8 * STEP, STEP // 2]], np.uint8))
    tokens, weights = batches.unpack(raw, raw, torch.device("cpu"))
    assert tokens.dtype == torch.int64
    assert weights.tolist() == [[1.0, 8.0, 0.5]]
