"""The orders of `rearrange.py`, which no interpreter runs: its functions on torch, which knows the same shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the package triton", minversion="3.6")

from rapidkda.backends.triton import rearrange

GL = SimpleNamespace(
    constexpr=int,
    reshape=lambda x, shape: x.reshape(shape),
    permute=lambda x, order: x.permute(order),
    join=lambda x, y: torch.stack([x, y], -1),
    split=lambda x: x.unbind(-1),
)


def run(name: str, *args: Any) -> Any:
    with mock.patch.object(rearrange, "gl", GL):
        return getattr(rearrange, name).fn(*args)


@pytest.mark.parametrize(
    ("there", "back", "shape", "args"),
    [
        ("in_order", "in_memory", (3, 128), (1,)),
        ("in_order", "in_memory", (3, 128), (2,)),
        ("at_columns", "as_values", (3, 128), ()),
        ("in_tiles", "out_of_tiles", (128, 5), ()),
    ],
)
def test_orders_are_undone(there: str, back: str, shape: tuple[int, int], args: tuple[int, ...]) -> None:
    x = torch.arange(shape[0] * shape[1]).reshape(shape)
    moved = run(there, x, *args)
    assert not torch.equal(moved, x)
    assert torch.equal(run(back, moved, *args), x)


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_of_a_thread_are_neighbours(groups: int) -> None:
    """A thread of four has columns 2 t, 2 t + 1 and 8 further on of every 16."""
    places = run("in_order", torch.arange(128)[None], groups)[0].reshape(-1, 2, 4, 2)  # tile, half, thread, column
    of_threads = places.permute(2, 0, 1, 3).reshape(4, -1, 4 * groups)
    for own in of_threads.reshape(-1, 4 * groups):
        assert own.tolist() == list(range(int(own[0]), int(own[0]) + 4 * groups))
        assert own[0] % (4 * groups) == 0


def test_values_of_a_thread_are_neighbours_and_the_same_in_both_operands() -> None:
    """Columns of a right operand and of results: tiles of 8 a warp, 4 warps side by side, then again. Rows of a left
    operand: tiles of 16 a warp, the halves 8 apart."""
    columns = run("at_columns", torch.arange(128)[None])[0].reshape(4, 4, 8)  # tile, warp, column
    right = columns.permute(1, 2, 0)  # what a thread of a warp reads: column j of each tile
    assert torch.equal(right, torch.arange(128).reshape(4, 8, 4))
    results = columns.reshape(4, 4, 4, 2).permute(1, 2, 3, 0).reshape(4, 4, 8)  # of a thread: two columns of each tile
    assert torch.equal(results, torch.arange(128).reshape(4, 4, 8))
    rows = run("in_tiles", torch.arange(128)[:, None])[:, 0].reshape(2, 4, 2, 8)  # tile, warp, half, row
    assert torch.equal(rows.permute(1, 3, 0, 2).reshape(4, 8, 4), right)


def test_joined_and_split() -> None:
    x, y = torch.arange(8).reshape(2, 4), torch.arange(8, 16).reshape(2, 4)

    def same(got: Tensor, want: Tensor) -> bool:
        return torch.equal(got, want)

    assert same(run("above", x, y), torch.cat([x, y]))
    assert same(run("twice", x), torch.cat([x, x], 1))
    assert all(map(same, run("halves", torch.cat([x, y])), (x, y)))
    assert all(map(same, run("sides", torch.cat([x, y], 1)), (x, y)))
