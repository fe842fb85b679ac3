"""Offsets beyond 2^31 elements. The buffers are 4 GiB of address space, of which a few pages are touched."""

from __future__ import annotations

import torch

from rapidkda import Checkpoints, Segments
from rapidkda.testing import Inputs, activated

from .cases import case
from .guards import same_bits
from .target import Target

TOKENS = 70
TOKEN_STRIDE = 2**31 // 64 + 4096  # elements: from token 64 on, offsets need more than 32 bits
SLOT_STRIDE = 2**30 + 4096  # below 2^31 itself, so that a compiler does not widen the product by chance


def wide(target: Target, rows: int, stride: int) -> torch.Tensor:
    """Uninitialised bfloat16 memory [rows, stride]."""
    return torch.empty(rows * stride, dtype=torch.bfloat16, device=target.device).view(rows, stride)


def small_inputs(target: Target, tokens: int) -> Inputs:
    return activated([tokens], -0.01, heads=1, dtype=torch.bfloat16, device=target.device, seed=38)


@case("B38")
def token_offsets(target: Target) -> None:
    """Operands and outputs whose token stride takes the last offset past 2^31: the bits of packed operands."""
    packed = small_inputs(target, TOKENS)
    packed.g, packed.beta = packed.g.bfloat16(), packed.beta.bfloat16()
    want = target.prefill(packed)
    buffer = wide(target, TOKENS, TOKEN_STRIDE)
    columns = 0
    for name in ("q", "k", "v", "g", "beta"):
        operand = getattr(packed, name)
        slice_ = buffer[:, columns : columns + operand[0].numel()].unflatten(1, tuple(operand.shape[1:]))
        slice_.copy_(operand)
        setattr(packed, name, slice_)
        columns += 128
    out = buffer[:, columns : columns + 128].unflatten(1, (1, 128))
    target.prefill(packed, out=out)
    same_bits("outputs", out, want)


@case("B39", op=("prefill", "decode", "slots", "replay", "deferred", "checkpoint"))
def slot_offsets(target: Target, op: str) -> None:
    """A pool whose slot 2 lies past 2^31 elements, with int32 slots: the bits of a packed pool."""
    inputs = small_inputs(target, 40 if op in ("prefill", "checkpoint") else 1)
    shape = tuple(inputs.states.shape[1:])
    size = inputs.states[0].numel()
    results = []
    for far in (False, True):
        memory = wide(target, 3, SLOT_STRIDE if far else size)
        pool = memory[:, :size].unflatten(1, shape)
        pool[0], pool[1], pool[2] = 1000.0, 1001.0, inputs.states[0].bfloat16()
        if op != "checkpoint":
            out = target.advance(op, inputs, state=pool, slots=target.index([2]))
        else:
            table = Checkpoints.build([(0, 32, 2)], 1, target.device)
            out = target.prefill(inputs, checkpoints=table, checkpoint_pool=pool)
        results.append((out, pool[:3].clone()))
        del memory, pool
    same_bits("outputs", results[1][0], results[0][0])
    same_bits("pool", results[1][1], results[0][1])


@case("B40")
def convolution_offsets(target: Target) -> None:
    """A convolution whose token stride takes offsets past 2^31: the bits of packed inputs."""
    channels = 64
    x = target.normal(TOKENS, channels, dtype=torch.bfloat16)
    weight = target.normal(channels, 4, seed=1)
    segments = Segments.from_lengths([40, TOKENS - 40], target.device)
    want = target.conv(x, weight, segments=segments)
    buffer = wide(target, TOKENS, TOKEN_STRIDE)
    buffer[:, :channels] = x
    out = buffer[:, 128 : 128 + channels]
    target.conv(buffer[:, :channels], weight, segments=segments, out=out)
    same_bits("outputs", out, want)
