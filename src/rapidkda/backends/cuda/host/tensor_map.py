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


def tileable(tensor: Tensor) -> Tensor:
    """The tensor itself if the copy engine can read it, else a dense copy.

    Column slices of fused projections qualify; an address or a stride that is no multiple of 16 bytes, or an expanded
    dimension, does not.
    """
    size = tensor.element_size()
    strides = [stride * size for extent, stride in zip(tensor.shape[:2], tensor.stride()[:2]) if extent > 1]
    if tensor.data_ptr() % ALIGNMENT == 0 and all(s > 0 and s % ALIGNMENT == 0 and s < 1 << 40 for s in strides):
        return tensor
    return tensor.contiguous()


def tensor_map(tensor: Tensor, blocks: int) -> bytes:
    """The map of a tileable tensor [T, heads, 128]; one copy moves 16 tokens of `blocks` blocks of 128 bytes.

    Dimensions: element in a block, token, block, head. Tokens past the end read as zeros.
    """
    tokens, heads, _ = tensor.shape
    token_stride, head_stride, _ = tensor.stride()
    size = tensor.element_size()
    if tokens <= 1:
        token_stride = 128
    if heads <= 1:
        head_stride = 128
    return _encode(
        tensor.data_ptr(), tokens, heads, token_stride * size, head_stride * size, tensor.dtype is torch.float32, blocks
    )


@functools.lru_cache(maxsize=8192)
def _encode(
    address: int, tokens: int, heads: int, token_stride: int, head_stride: int, is_float: bool, blocks: int
) -> bytes:
    from cuda.bindings import driver  # type: ignore[import-untyped]

    element = _BLOCK // (4 if is_float else 2)
    types = driver.CUtensorMapDataType
    result = compiler.check(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32 if is_float else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            4,
            address,
            [driver.cuuint64_t(x) for x in (element, tokens, 128 // element, heads)],
            [driver.cuuint64_t(x) for x in (token_stride, _BLOCK, head_stride)],
            [driver.cuuint32_t(x) for x in (element, CHUNK, blocks, 1)],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(result.getPtr()), 128)
