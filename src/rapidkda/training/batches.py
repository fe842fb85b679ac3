"""Packed rows of training tokens, made by worker processes while the GPU computes.

Rows hold documents of several kinds, separated by the end token; where a row is full, its last document is cut. Every
token has a weight in the loss: what can only be guessed counts little, what is asked for counts more.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from . import tasks
from .model import END

KINDS = ("text", "needles", "arithmetic", "copy")
Mixture = tuple[float, float, float, float]  # share of tokens of each kind
MIXTURE: Mixture = (0.45, 0.30, 0.15, 0.10)
# loss weight of a kind's tokens: those of answers, and all others
WEIGHTS = {"text": (1.0, 1.0), "needles": (8.0, 0.5), "arithmetic": (3.0, 0.5), "copy": (1.0, 0.1)}
STEP = 16  # weights are stored in sixteenths, as bytes
LONGEST_COPY = 1536
LONGEST_TEXT = 4096
SEEDS = 1 << 40  # each worker counts up from its own multiple of this


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens of one kind with their loss weights in sixteenths, both uint8 arrays of one length."""

    kind: str
    tokens: np.ndarray
    weights: np.ndarray


def row(seeds: Iterator[int], corpus: str, length: int, mixture: Mixture = MIXTURE) -> tuple[np.ndarray, np.ndarray]:
    """One packed row: tokens and weights, both uint8 [length].

    A row is either needle samples that fill it or a mixture of the other kinds, so that a needle sample may be as long
    as the row.
    """
    rng = random.Random(next(seeds))
    documents: list[Document] = []
    full = 0
    if rng.random() < mixture[KINDS.index("needles")]:
        pieces = rng.choice((1, 1, 2, 4)) if length >= 1024 else 1
        for _ in range(pieces):
            documents.append(_needles(next(seeds), rng, corpus, length // pieces - 1))
            full += len(documents[-1].tokens) + 1
    while full < length:
        documents.append(_other(next(seeds), rng, corpus, length, mixture))
        full += len(documents[-1].tokens) + 1
    end = np.array([END], np.uint8), np.array([STEP], np.uint8)
    tokens = itertools.chain.from_iterable((one.tokens, end[0]) for one in documents)
    weights = itertools.chain.from_iterable((one.weights, end[1]) for one in documents)
    return np.concatenate(list(tokens))[:length], np.concatenate(list(weights))[:length]


def _needles(seed: int, rng: random.Random, corpus: str, length: int) -> Document:
    count = rng.randint(2, min(64, tasks.most_needles(length)))
    return _document(tasks.needles(seed, "train", length=length, count=count, filler=corpus))


def _other(seed: int, rng: random.Random, corpus: str, length: int, mixture: Mixture) -> Document:
    """Text, arithmetic or a copy; the sizes of each make the choice give the mixture's shares of tokens."""
    copied = rng.randint(48, min(LONGEST_COPY, length))
    written = rng.randint(256, min(LONGEST_TEXT, max(length, 512)))
    mean = {"text": (256 + min(LONGEST_TEXT, max(length, 512))) / 2, "arithmetic": 900.0}
    mean["copy"] = (48 + min(LONGEST_COPY, length)) / 2
    shares = dict(zip(KINDS, mixture))
    kind = rng.choices(tuple(mean), [shares[kind] / mean[kind] for kind in mean])[0]
    if kind == "arithmetic":
        return _problems(seed, rng)
    if kind == "copy":
        return _document(tasks.copy(seed, "train", length=copied, filler=corpus))
    start = rng.randrange(len(corpus) - written)
    tokens = np.frombuffer(corpus[start : start + written].encode("latin-1"), np.uint8)
    return Document("text", tokens, np.full(len(tokens), STEP, np.uint8))


def _problems(seed: int, rng: random.Random) -> Document:
    """A handful of problems, each a document of its own."""
    parts = [_document(tasks.arithmetic(seed * 16 + i, "train")) for i in range(rng.randint(1, 8))]
    end = np.array([END], np.uint8)
    tokens = [array for part in parts for array in (part.tokens, end)][:-1]
    weights = [array for part in parts for array in (part.weights, np.array([STEP], np.uint8))][:-1]
    return Document("arithmetic", np.concatenate(tokens), np.concatenate(weights))


def _document(sample: tasks.Sample) -> Document:
    tokens = np.frombuffer(sample.tokens, np.uint8)
    answer, other = (int(STEP * weight) for weight in WEIGHTS[sample.task])
    weights = np.full(len(tokens), other, np.uint8)
    for one in sample.answers:
        weights[one.start : one.end] = answer
    return Document(sample.task, tokens, weights)


class Batches:
    """An endless stream of batches: tokens and weights, uint8 [tokens of a batch // length, length], for `unpack`.

    Args:
        corpus: file of the training text.
        tokens: of a batch.
        length: of a row; may be set anew at any time, batches that wait keep theirs.
        seed: of this run; another run takes another seed.
        mixture: share of tokens of each of `KINDS`.
        workers: processes; 0 makes the batches in this one.
    """

    def __init__(
        self,
        corpus: Path,
        *,
        tokens: int,
        length: int,
        seed: int,
        mixture: Mixture = MIXTURE,
        workers: int,
        pin: bool = False,
    ):
        self._length: Any = multiprocessing.Value("l", length)
        text = corpus.read_bytes().decode("latin-1").replace("\0", "\n")
        stream = _Stream(text, tokens, self._length, seed, mixture)
        self._loader = DataLoader(
            stream, batch_size=None, num_workers=workers, pin_memory=pin, prefetch_factor=8 if workers else None
        )

    @property
    def length(self) -> int:
        """Tokens of the rows that are made from now on."""
        return int(self._length.value)

    @length.setter
    def length(self, value: int) -> None:
        self._length.value = value

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._loader)


class _Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, corpus: str, tokens: int, length: Any, seed: int, mixture: Mixture):
        self._corpus, self._tokens, self._length, self._seed = corpus, tokens, length, seed
        self._mixture = mixture

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        seeds = itertools.count((self._seed * 1024 + (worker.id if worker is not None else 0)) * SEEDS)
        while True:
            length = int(self._length.value)
            rows = [row(seeds, self._corpus, length, self._mixture) for _ in range(self._tokens // length)]
            tokens, weights = (torch.from_numpy(np.stack(parts)) for parts in zip(*rows))
            yield tokens, weights


def unpack(tokens: Tensor, weights: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch on the device: int64 tokens and float32 weights."""
    return (
        tokens.to(device, non_blocking=True).long(),
        weights.to(device, non_blocking=True).float() / STEP,
    )
