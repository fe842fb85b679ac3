"""Batch-invariant mode: a request's tokens do not depend on its batch mates, to the bit.

A matrix product may round a row differently with other numbers of rows, and rounding decides where two tokens or two
experts tie. In this mode every linear layer runs in tiles of the same number of rows, filled up with zeros, attention
runs token by token, experts run one after another, and prompts are cut at fixed places. What remains is work whose
rounding does not depend on the shape of the step. It needs a matrix product that rounds all rows of a tile alike,
whatever their place and whatever the other rows hold; `check_tiles` measures that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

TILE = 16  # rows


class RowTiles(TorchFunctionMode):
    """While it is entered, every `torch.nn.functional.linear` runs in tiles of `TILE` rows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _tiled(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _tiled(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` with its argument names."""
    rows = input.reshape(-1, input.shape[-1])
    count = rows.shape[0]
    padded = rows.new_zeros(-(-count // TILE) * TILE, rows.shape[1])
    padded[:count] = rows
    tiles = [F.linear(tile, weight, bias) for tile in padded.split(TILE)] if count else [F.linear(padded, weight, bias)]
    return torch.cat(tiles)[:count].view(*input.shape[:-1], -1)


def check_tiles(in_features: int, out_features: int, dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether a row of a tile has the same bits at every place and beside any other rows."""
    generator = torch.Generator().manual_seed(0)

    def random(*extents: int) -> Tensor:
        return torch.randn(extents, generator=generator).to(device, dtype)

    weight, row = random(out_features, in_features), random(in_features)
    results = []
    for place in range(TILE):
        tile = random(TILE, in_features)
        tile[place] = row
        results.append(F.linear(tile, weight)[place])
    return all(torch.equal(result, results[0]) for result in results)
