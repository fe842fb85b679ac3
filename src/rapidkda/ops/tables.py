"""Segment tables of calls that bring none: equal segments, one after another."""

from __future__ import annotations

import functools

import torch

from ..segments import Segments


def equal(count: int, length: int, device: torch.device) -> Segments:
    """`Segments.equal`, made once for a stream that asks again.

    Two streams share no table, since the one that did not fill it could run ahead. A graph capture takes none either:
    what it records must live as long as the graph.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return Segments.equal(count, length, device)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    return _kept(count, length, device, stream)


@functools.lru_cache(maxsize=64)
def _kept(count: int, length: int, device: torch.device, stream: int) -> Segments:
    return Segments.equal(count, length, device)
