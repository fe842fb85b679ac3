"""Calls of a known kind, launched from the addresses of their tensors.

A backend that has run a call may say how it launches others of the kind from addresses (`problem.Repeat`). Where each
of those tensors stands among the arguments is found out here, once a kind; from then on a call is its lookup, a list of
addresses, and the launch. What no kind can hold is checked here too: an output that is an input, or a workspace that
is not aligned, goes the usual way, where the error is raised.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

from torch import Tensor

from ..problem import Repeat
from ..segments import Checkpoints, Segments

ALIGNMENT, WORKSPACE_ALIGNMENT = 16, 256  # bytes
Inputs = Sequence[Tensor | None]
Pick = Callable[[list[int]], tuple[int, ...]]

_address = Tensor.data_ptr


class Repeater:
    """Launches calls of one kind.

    Args:
        repeat: the backend's, of a call with these tensors.
        given: the tensors of that call that are not None, in the order in which `__call__` gets them.
        segments, checkpoints: of that call.
        out, inputs: an output, and what it must not be.
        workspace: its address must be aligned.
        views: of the first of the given tensors, at the same place in it in every call of the kind.

    Raises LookupError where an address cannot be told from the arguments.
    """

    def __init__(
        self,
        repeat: Repeat,
        given: Sequence[Tensor],
        segments: Segments | None,
        checkpoints: Checkpoints | None,
        out: Tensor | None = None,
        inputs: Inputs = (),
        workspace: Tensor | None = None,
        views: Sequence[Tensor] = (),
    ):
        everything = [*given, *_tables(segments, checkpoints), *views]
        places = {id(x): n for n, x in enumerate(everything)}
        if len(places) < len(everything):
            raise LookupError("a tensor is given twice, so it does not say which of the two arguments is meant")
        self._past = [_address(view) - _address(given[0]) for view in views]
        self._aligned = _pick(list({places[id(x)] for x in repeat.aligned}))
        self._out = None if out is None else places[id(out)]
        self._inputs = _pick([places[id(x)] for x in inputs if x is not None])
        self._workspace = None if workspace is None else places[id(workspace)]
        self._addresses = _pick([places[id(x)] for x in repeat.tensors])
        self._launch = repeat.launch

    def __call__(self, given: Sequence[Tensor], segments: Segments | None, checkpoints: Checkpoints | None) -> bool:
        """Launch a call; False where it has to go the usual way."""
        addresses = [*map(_address, given)]
        if segments is not None:
            addresses += map(_address, _tables(segments, checkpoints))
        addresses += [addresses[0] + past for past in self._past]
        if self._out is not None and addresses[self._out] in self._inputs(addresses):
            return False
        if self._workspace is not None and addresses[self._workspace] % WORKSPACE_ALIGNMENT:
            return False
        if functools.reduce(operator.or_, self._aligned(addresses), 0) % ALIGNMENT:
            return False
        return self._launch(self._addresses(addresses))


def _pick(places: list[int]) -> Pick:
    """Takes what stands at these places; `itemgetter` alone takes one thing out of its tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda addresses: tuple([addresses[place] for place in places])


def _tables(segments: Segments | None, checkpoints: Checkpoints | None) -> tuple[Tensor, ...]:
    tables = () if segments is None else (segments.first_token, segments.length)
    return tables if checkpoints is None else (*tables, checkpoints.begin, checkpoints.offset, checkpoints.slot)
