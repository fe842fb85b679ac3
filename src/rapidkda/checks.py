"""Argument checks of the front door. Each raises a ValueError or TypeError that names the argument, what it got and
what it takes. Written as plain `if`s, so that they hold under `python -O`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
STATE_DTYPES = (torch.float32, torch.bfloat16)
INTS = (torch.int32, torch.int64)
BOOLS = (torch.bool, torch.int32, torch.uint8)
MIN_LOWER_BOUND = -5.0


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def tensor(name: str, value: Any) -> Tensor:
    """A tensor, or TypeError."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def shape(name: str, value: Tensor, expected: tuple[int | None, ...], meaning: str) -> None:
    """The expected shape; None matches any extent. `meaning` is the symbolic shape for the message."""
    got = value.shape
    if got == expected:  # the common case, at the speed of a tuple comparison
        return
    if len(got) == len(expected) and all(e is None or e == g for e, g in zip(expected, got, strict=True)):
        return
    wanted = ", ".join("*" if e is None else str(e) for e in expected)
    raise ValueError(f"{name} must have shape {meaning} = [{wanted}], got {list(got)}")


def dtype(name: str, value: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if value.dtype not in allowed:
        raise TypeError(f"{name} must be one of {_names(allowed)}, got {_names([value.dtype])}")


def same_device(name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like q (or x), got {value.device}")


def dense_last(name: str, value: Tensor) -> None:
    """The last dimension must be dense; every other stride is free."""
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        raise ValueError(f"{name} must have a dense last dimension (stride 1), got strides {list(value.stride())}")


def dense_inner(name: str, value: Tensor, leading: int = 1) -> None:
    """All but the first `leading` dimensions must be dense; the leading strides are free."""
    expected = 1
    for extent, stride in zip(reversed(value.shape[leading:]), reversed(value.stride()[leading:]), strict=True):
        if extent > 1 and stride != expected:
            raise ValueError(
                f"{name} must be dense in its last {value.ndim - leading} dimensions, "
                f"got shape {list(value.shape)} with strides {list(value.stride())}"
            )
        expected *= extent


def no_self_overlap(name: str, value: Tensor) -> None:
    """A tensor that is written must not map two indices to one address, as an expanded one does."""
    if any(extent > 1 and stride == 0 for extent, stride in zip(value.shape, value.stride(), strict=True)):
        raise ValueError(f"{name} is written, so it must not be an expanded view; got strides {list(value.stride())}")


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether any element of `a` lies in the memory of one of `b`; column slices of one buffer need not."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    (starts, size), (others, other_size) = _runs(a), _runs(b)
    near = np.searchsorted(others, starts - other_size, side="right")  # the first that ends after each start
    found = near < len(others)
    return bool((others[near[found]] < starts[found] + size).any())


def _runs(value: Tensor) -> tuple[np.ndarray, int]:
    """The addresses of a tensor's dense runs, sorted, and the bytes of each."""
    size = value.element_size()
    dims = [(extent, stride * size) for extent, stride in zip(value.shape, value.stride()) if extent > 1]
    while dims and dims[-1][1] == size:
        size *= dims.pop()[0]
    starts = np.zeros(1, np.int64)
    for extent, stride in dims:
        starts = (starts[:, None] + np.arange(extent) * stride).reshape(-1)
    return np.sort(starts + value.data_ptr()), size


def choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(repr(a) for a in allowed)}, got {value!r}")


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__} {value!r}")
    return value


def finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return float(value)


def lower_bound(value: Any) -> float:
    """The floor of a bounded gate's log decay: at least -5, where 16 tokens of it still fit a float's range."""
    bound = finite("lower_bound", value)
    if not MIN_LOWER_BOUND <= bound < 0.0:
        raise ValueError(f"lower_bound must be in [{MIN_LOWER_BOUND:g}, 0), got {bound}")
    return bound


def integer(name: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    return int(value)
