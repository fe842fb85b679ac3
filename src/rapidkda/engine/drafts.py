"""Where draft tokens come from.

A drafter only guesses: whatever it proposes, the engine's output is that of the model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .. import checks
from .request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """What a step has settled of one request.

    Attributes:
        request: the request.
        hidden: [n, D], the model's hidden states, after its last norm, of the tokens that the step computed and that
            stay (rejected drafts are left out).
        following: the n tokens that follow each of them; all are known.
    """

    request: Request
    hidden: Tensor
    following: Sequence[int]


class Drafter(Protocol):
    """Proposes tokens that may follow."""

    def observe(self, progress: Sequence[Progress]) -> None:
        """Hear what a step has settled, of every request that goes on."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """For each (request, most tokens), 0 to that many tokens that may follow `request.tokens`."""

    def forget(self, request_id: Hashable) -> None:
        """The request has ended or starts over; it may be unknown."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that the drafter holds beside its weights."""


class PromptLookup:
    """Drafts from the request's own text: what followed its last few tokens when they last occurred.

    Args:
        max_ngram: longest run of last tokens to look for; longer ones are tried first.
        min_ngram: shortest.
    """

    nbytes = 0

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1):
        self.min_ngram = checks.integer("min_ngram", min_ngram, 1)
        self.max_ngram = checks.integer("max_ngram", max_ngram, self.min_ngram)
        self._indices: dict[Hashable, _NgramIndex] = {}

    def observe(self, progress: Sequence[Progress]) -> None:
        """Nothing to learn: the text is in the request."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        """See `Drafter`."""
        return [self._propose(request, count) for request, count in wanted]

    def forget(self, request_id: Hashable) -> None:
        """See `Drafter`."""
        self._indices.pop(request_id, None)

    def _propose(self, request: Request, count: int) -> list[int]:
        index = self._indices.setdefault(request.request_id, _NgramIndex(self.min_ngram, self.max_ngram))
        start = index.find(request.tokens)
        if start is None:
            return []
        drafts = request.tokens[start : start + count]
        while len(drafts) < count:  # a text that repeats itself goes on repeating: copy from the drafts themselves
            drafts.append(drafts[start - len(request.tokens)])
        return drafts


class _NgramIndex:
    """Where each run of tokens last ended in one text, kept up to date as the text grows."""

    def __init__(self, shortest: int, longest: int):
        self._lengths = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # ends up to here are in the index

    def find(self, tokens: Sequence[int]) -> int | None:
        """The place after the last earlier occurrence of the longest run that ends the text."""
        for end in range(self._indexed + 1, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._after[tuple(tokens[end - length : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for length in self._lengths:
            found = self._after.get(tuple(tokens[len(tokens) - length :])) if length < len(tokens) else None
            if found is not None:
                return found
        return None
