"""Validated calls on CPU tensors that make the backend launch every kernel it has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rapidkda.problem import (
    CommitCall,
    ConvCall,
    DecodeCall,
    Gate,
    GateKind,
    NormCall,
    PrefillCall,
    Tokens,
    VerifyCall,
)
from rapidkda.segments import Checkpoints, Segments


def tokens(
    count: int,
    *,
    heads: int = 16,
    value_heads: int = 16,
    key_dim: int = 128,
    value_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    gate: GateKind = "softplus",
) -> Tokens:
    """Zeros, as the slices of one fused buffer that engines pass."""
    columns = heads * key_dim
    fused = torch.zeros(count, 2 * columns + value_heads * value_dim, dtype=dtype)
    raw = gate != "log_decay"
    return Tokens(
        q=fused[:, :columns].unflatten(1, (heads, key_dim)),
        k=fused[:, columns : 2 * columns].unflatten(1, (heads, key_dim)),
        v=fused[:, 2 * columns :].unflatten(1, (value_heads, value_dim)),
        g=torch.zeros(count, value_heads, key_dim, dtype=dtype),
        beta=torch.zeros(count, value_heads, dtype=dtype),
        gate=Gate(
            gate,
            -5.0 if gate == "bounded" else None,
            torch.zeros(value_heads) if raw else None,
            torch.zeros(value_heads, key_dim) if raw else None,
        ),
        beta_logits=True,
        beta_scale=1.0,
        l2norm=True,
        scale=key_dim**-0.5,
    )


def prefill(
    lens: Sequence[int], state_dtype: torch.dtype = torch.float32, export: bool = False, **options: object
) -> PrefillCall:
    inputs = tokens(sum(lens), **options)  # type: ignore[arg-type]
    pool = torch.zeros(len(lens) + 1, inputs.value_heads, inputs.value_dim, inputs.key_dim, dtype=state_dtype)
    slots = torch.arange(len(lens), dtype=torch.int32)
    return PrefillCall(
        tokens=inputs,
        segments=Segments.from_lengths(lens),
        out=torch.zeros_like(inputs.v),
        initial=pool,
        final=pool,
        read_slots=slots,
        write_slots=slots,
        has_initial_state=torch.ones(len(lens), dtype=torch.bool),
        state_v_first=True,
        pad_slot=-1,
        checkpoints=Checkpoints.build([(0, 16, 0)], len(lens)) if export else None,
        checkpoint_pool=pool.clone() if export else None,
        workspace=None,
    )


def decode(batch: int, state_dtype: torch.dtype = torch.float32, **options: object) -> DecodeCall:
    inputs = tokens(batch, **options)  # type: ignore[arg-type]
    pool = torch.zeros(batch, inputs.value_heads, inputs.value_dim, inputs.key_dim, dtype=state_dtype)
    slots = torch.arange(batch, dtype=torch.int32)
    return DecodeCall(inputs, Segments.equal(batch, 1), torch.zeros_like(inputs.v), pool, slots, slots, True, -1)


def verify(
    batch: int,
    replay: bool,
    most: int = 2,
    rows: int = 0,
    state_dtype: torch.dtype = torch.float32,
    **options: object,
) -> VerifyCall:
    """Requests of `most` tokens, the most that one may have. `rows`: records a slot of deferred states."""
    inputs = tokens(most * batch, **options)  # type: ignore[arg-type]
    pool = torch.zeros(most * batch, inputs.value_heads, inputs.value_dim, inputs.key_dim, dtype=state_dtype)
    slots = torch.arange(most * batch, dtype=torch.int32)
    width = 2 * inputs.key_dim + inputs.value_dim
    return VerifyCall(
        tokens=inputs,
        segments=Segments.equal(batch, most),
        out=torch.zeros_like(inputs.v),
        pool=pool,
        slots=slots[:batch] if replay else slots.view(batch, most),
        accepted=torch.ones(batch, dtype=torch.int32),
        records=torch.zeros(most * batch, rows or most, inputs.value_heads, width) if replay else None,
        held=torch.zeros(most * batch, inputs.value_heads, dtype=torch.int32) if rows else None,
        state_v_first=True,
        pad_slot=-1,
    )


def commit(batch: int, rows: int = 0) -> CommitCall:
    call = verify(batch, replay=True, rows=rows)
    records = call.records
    assert records is not None
    return CommitCall(call.pool, records, call.held, call.slots, call.accepted, True, -1)


def conv(lens: Sequence[int], keep_all: bool = False) -> ConvCall:
    x = torch.zeros(sum(lens), 512, dtype=torch.bfloat16)
    slots = torch.arange(len(lens), dtype=torch.int32)
    return ConvCall(
        x=x,
        weight=torch.zeros(512, 4),
        bias=None,
        out=torch.zeros_like(x),
        segments=Segments.from_lengths(lens),
        pool=torch.zeros(len(lens), 6, 512, dtype=torch.bfloat16),
        channels_last=True,
        read_slots=slots,
        write_slots=slots,
        has_initial_state=None,
        accepted=torch.ones(len(lens), dtype=torch.int32) if keep_all else None,
        keep_all=keep_all,
        silu=True,
        pad_slot=-1,
        checkpoints=None,
        checkpoint_pool=None,
    )


def norm(count: int) -> NormCall:
    x = torch.zeros(count, 16, 128, dtype=torch.bfloat16)
    return NormCall(x, x.clone(), torch.zeros(128), 1e-5, "sigmoid", torch.zeros_like(x))
