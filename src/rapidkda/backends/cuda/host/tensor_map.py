"""Tensor maps: how the copy engine reads tiles of 16 tokens of one head from a strided tensor [T, heads, 128]."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .. import compiler

CHUNK = 16
ALIGNMENT = 16  # bytes; of the address and of every stride
_BLOCK = 128  # bytes; the swizzle's width


def tensor_map(tensor: Tensor, blocks: int, keep: list[Tensor], rows: int = CHUNK) -> bytes:
    """The map of a tensor [T, heads, 128], bf16 or fp32; one copy moves `rows` tokens of `blocks` blocks of 128 bytes.

    A tensor that the copy engine cannot read is copied first, and the copy appended to `keep`: it must outlive the
    launch. Column slices of fused projections are read in place; an address or a stride that is no multiple of 16
    bytes, or an expanded dimension, is not.
    """
    found = _encode(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype is torch.float32, blocks, rows)
    if found is not None:
        return found
    dense = tensor.clone(memory_format=torch.contiguous_format)  # contiguous() keeps one off the alignment
    keep.append(dense)
    return tensor_map(dense, blocks, keep, rows)


@functools.lru_cache(maxsize=8192)
def _encode(
    address: int, shape: torch.Size, strides: tuple[int, ...], is_float: bool, blocks: int, rows: int
) -> bytes | None:
    """Dimensions: element in a 128-byte block, token, block, head. Tokens past the end read as zeros."""
    from cuda.bindings import driver  # type: ignore[import-untyped]

    size = 4 if is_float else 2
    steps = [stride * size if extent > 1 else ALIGNMENT for extent, stride in zip(shape[:2], strides[:2])]
    if address % ALIGNMENT or any(step <= 0 or step % ALIGNMENT or step >= 1 << 40 for step in steps):
        return None
    element = _BLOCK // size
    types = driver.CUtensorMapDataType
    result = compiler.check(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32 if is_float else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            4,
            address,
            [driver.cuuint64_t(x) for x in (element, shape[0], 128 // element, shape[1])],
            [driver.cuuint64_t(x) for x in (steps[0], _BLOCK, steps[1])],
            [driver.cuuint32_t(x) for x in (element, rows, blocks, 1)],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(result.getPtr()), 128)
