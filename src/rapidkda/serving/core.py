"""The stateful part of a layer: causal convolution and KDA of a mixed step, pools updated in place.

It takes projections and leaves KDA outputs, so that a model with projections of its own can run it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import ops
from ..dispatch import Choice
from ..problem import Op
from .batch import StepBatch
from .pool import LayerState, StatePool
from .tables import RowTable, VerifyTable


@dataclass(slots=True, eq=False)
class CoreInputs:
    """Token-axis tensors of one layer's step; column slices are fine, only last dimensions are dense.

    Attributes:
        x: [T, C] convolution inputs, q | k | v side by side.
        g: [T, HV, K] gate logits.
        beta: [T, HV] write strength logits.
        conv_weight: [C, W].
        gate: `A_log`, `dt_bias`, `lower_bound` and `allow_neg_eigval` as `rapidkda.ops.prefill` takes them.
        conv_out: [T, C], overwritten.
        out: [T, HV, V], overwritten; rows of no request are left alone.
        scratch: uint8, for the prefill backend.
    """

    x: Tensor
    g: Tensor
    beta: Tensor
    conv_weight: Tensor
    gate: Mapping[str, Any]
    conv_out: Tensor
    out: Tensor
    scratch: Tensor


def run_core(
    inputs: CoreInputs, batch: StepBatch, pool: StatePool, state: LayerState, choices: Mapping[Op, Choice]
) -> None:
    """Run the convolution and KDA of every table of the step. Raises as `rapidkda.ops` does."""
    tokens = _tokens(inputs, pool)
    common: dict[str, Any] = {"state": state.recurrent, "pad_slot": pool.pad_slot}
    if batch.prefill is not None:
        table = batch.prefill
        _enter(inputs, table, pool, state, choices)
        ops.prefill(
            **tokens,
            **common,
            segments=table.segments,
            slots=table.slots,
            read_slots=table.read_slots,
            has_initial_state=table.has_initial_state,
            checkpoints=table.checkpoints,
            checkpoint_pool=None if table.checkpoints is None else state.recurrent,
            workspace=inputs.scratch,
            backend=choices["prefill"],
        )
    if batch.decode is not None:
        table = batch.decode
        _enter(inputs, table, pool, state, choices)
        ops.decode(
            **tokens,
            **common,
            segments=table.segments,
            slots=table.slots,
            read_slots=table.read_slots,
            backend=choices["decode"],
        )
    if batch.verify is not None:
        _convolve_drafts(inputs, batch.verify, pool, state, choices)
        ops.verify(
            **tokens,
            **common,
            segments=batch.verify.segments,
            slots=batch.verify.slots,
            accepted=batch.verify.accepted,
            records=state.records,
            backend=choices["verify"],
        )


def _tokens(inputs: CoreInputs, pool: StatePool) -> dict[str, Any]:
    """q, k and v as views of the convolution output, and what else every operator takes."""
    shape, count = pool.shape, inputs.conv_out.shape[0]
    q, k, v = inputs.conv_out.split_with_sizes(list(shape.conv_parts), 1)
    return {
        "q": q.view(count, shape.heads, shape.key_dim),
        "k": k.view(count, shape.heads, shape.key_dim),
        "v": v.view(count, shape.value_heads, shape.value_dim),
        "g": inputs.g,
        "beta": inputs.beta,
        "out": inputs.out,
        **inputs.gate,
    }


def _enter(
    inputs: CoreInputs, table: RowTable, pool: StatePool, state: LayerState, choices: Mapping[Op, Choice]
) -> None:
    """Convolve prefills or decodes; fold the accepted records of those that leave speculation into their states."""
    ops.causal_conv(
        inputs.x,
        inputs.conv_weight,
        segments=table.segments,
        state=state.conv,
        slots=table.slots,
        read_slots=table.conv_read_slots,
        has_initial_state=table.has_initial_state,
        accepted=table.accepted if table.settles else None,
        channels_last=pool.shape.conv_channels_last,
        out=inputs.conv_out,
        pad_slot=pool.pad_slot,
        checkpoints=table.checkpoints,
        checkpoint_pool=None if table.checkpoints is None else state.conv,
        backend=choices["conv"],
    )
    if table.settles and state.records is not None:
        ops.commit(
            state=state.recurrent,
            records=state.records,
            slots=table.slots,
            accepted=table.accepted,
            pad_slot=pool.pad_slot,
            backend=choices["verify"],
        )


def _convolve_drafts(
    inputs: CoreInputs, table: VerifyTable, pool: StatePool, state: LayerState, choices: Mapping[Op, Choice]
) -> None:
    """Convolve verifications and keep all of their inputs, so that the next step can go on after any token."""
    ops.causal_conv(
        inputs.x,
        inputs.conv_weight,
        segments=table.segments,
        state=state.conv,
        slots=table.conv_slots,
        accepted=table.accepted,
        keep_all=True,
        channels_last=pool.shape.conv_channels_last,
        out=inputs.conv_out,
        pad_slot=pool.pad_slot,
        backend=choices["conv"],
    )
