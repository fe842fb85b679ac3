"""Rows of state pools by slot: which are padding, reading them, and writing only the ones that count.

Nothing here reads a device tensor on the host: on a CPU rows are compacted, elsewhere masked rows are redirected.
"""

from __future__ import annotations

import torch
from torch import Tensor


def usable(slots: Tensor, pool_rows: int, pad_slot: int) -> Tensor:
    """Which slots name a row of the pool: bool, shape of `slots`."""
    if slots.is_cpu:  # numpy compares a few numbers in a third of the time
        values = slots.numpy()
        return torch.from_numpy((values != pad_slot) & (values >= 0) & (values < pool_rows))
    return (slots != pad_slot) & (slots >= 0) & (slots < pool_rows)


def read_rows(pool: Tensor, slots: Tensor, mask: Tensor) -> Tensor:
    """pool[slots] as a copy; rows whose mask is false hold anything."""
    if pool.shape[0] == 0:
        return pool.new_zeros(slots.shape[0], *pool.shape[1:])
    return pool.index_select(0, torch.where(mask, slots, 0))


def view_rows(pool: Tensor, slots: Tensor) -> Tensor | None:
    """pool[slots] on a CPU as a dense view, if the slots, all of them real, follow one another; else None."""
    if not pool.is_contiguous():
        return None
    values = slots.tolist()
    first, count = values[0], len(values)
    return pool[first : first + count] if values == list(range(first, first + count)) else None


def write_rows(pool: Tensor, slots: Tensor, values: Tensor, mask: Tensor) -> None:
    """pool[slots[n]] = values[n] where mask[n]; nothing else changes. Unmasked slots must be distinct."""
    if pool.shape[0] == 0 or slots.shape[0] == 0:
        return
    if pool.device.type != "cpu":
        redirect_rows(pool, slots, values, mask)
        return
    if not mask.all():
        keep = mask.nonzero().squeeze(1)
        slots, values = slots.index_select(0, keep), values.index_select(0, keep)
    pool.index_copy_(0, slots.long(), values.to(pool.dtype))


def redirect_rows(pool: Tensor, slots: Tensor, values: Tensor, mask: Tensor) -> None:
    """`write_rows` where the host must not know the mask.

    Masked rows repeat the write of the first unmasked row; if there is none, they write the pool's first row back to
    itself.
    """
    values = values.to(pool.dtype)
    any_row = mask.any()
    first = mask.to(torch.uint8).argmax().reshape(1)
    spare_slot = torch.where(any_row, slots.index_select(0, first), 0)
    spare_value = torch.where(any_row, values.index_select(0, first), pool[:1])
    row_mask = mask.reshape(-1, *(1,) * (values.ndim - 1))
    pool.index_copy_(0, torch.where(mask, slots, spare_slot).long(), torch.where(row_mask, values, spare_value))
