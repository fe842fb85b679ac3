"""Batch-invariant mode: a request's tokens do not depend on its batch mates, to the bit.

Kernels may round one token's row differently in a larger or smaller step: matrix products by the number of rows,
elementwise functions by where the row lies. Rounding then decides where two tokens or two experts tie. In this mode
every token goes through the model by itself, in tensors of its own that have the same shape in every step, and prompts
are cut at fixed places. Only the convolution and KDA see a whole request at once. Drafts need the slots form of
rollback: replay folds accepted tokens into the state together, which rounds by their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class RowByRow(TorchFunctionMode):
    """While it is entered, every `torch.nn.functional.linear` takes one row at a time."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return _by_row(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _by_row(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` with its argument names."""
    rows = input.reshape(-1, input.shape[-1])
    if rows.shape[0] <= 1:
        return F.linear(input, weight, bias)
    products = [F.linear(row.clone(), weight, bias) for row in rows.split(1)]  # copies: aligned alike
    return torch.cat(products).view(*input.shape[:-1], -1)
