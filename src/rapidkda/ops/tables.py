"""Segment tables of calls that bring none: equal segments, one after another."""

from __future__ import annotations

import torch

from ..segments import Segments

# Kept for good: a graph that was captured with a table reads it as long as it is replayed. Two tables of int32 each.
_MOST = 4096
_kept: dict[tuple[int, int, torch.device], Segments] = {}


def equal(count: int, length: int, device: torch.device) -> Segments:
    """`Segments.equal`, made once: whoever asks again, on whatever stream or in a graph capture, gets the same tables.

    They are complete before they are handed out, so no stream has to wait for the one that filled them. What a capture
    asks for first becomes part of its graph, and a graph fills it in every replay: call once before capturing, as one
    does to compile.
    """
    key = count, length, device
    kept = _kept.get(key)
    if kept is not None:
        return kept
    if device.type != "cuda":
        kept = Segments.equal(count, length, device)
    elif torch.cuda.is_current_stream_capturing() or len(_kept) >= _MOST:
        return Segments.equal(count, length, device)
    else:
        filling = torch.cuda.Stream(device)
        with torch.cuda.stream(filling):
            kept = Segments.equal(count, length, device)
        filling.synchronize()
    if len(_kept) < _MOST:
        _kept[key] = kept
    return kept
