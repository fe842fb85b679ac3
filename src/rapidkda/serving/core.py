"""The stateful part of a layer: causal convolution, KDA and gated norm of a mixed step, pools updated in place.

It takes projections and leaves KDA outputs, so that a model with projections of its own can run it too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import ops
from ..backends.base import FusingBackend
from ..dispatch import Choice, load
from ..segments import Segments
from .backends import LayerOp
from .batch import StepBatch
from .pool import LayerState, StatePool
from .tables import RowTable, VerifyTable


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """The gated norm of a layer's outputs: z [T, HV, V], weight [V]."""

    z: Tensor
    weight: Tensor
    eps: float


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
        out: [T, HV, V], overwritten; rows of no request hold anything.
        scratch: uint8, for the prefill backend.
        norm: None: outputs as KDA leaves them, rows of no request left alone.
        fuse: let the prefill backend take the convolution and the norm on where it can.
    """

    x: Tensor
    g: Tensor
    beta: Tensor
    conv_weight: Tensor
    gate: Mapping[str, Any]
    conv_out: Tensor
    out: Tensor
    scratch: Tensor
    norm: GatedNorm | None = None
    fuse: bool = True


def run_core(
    inputs: CoreInputs, batch: StepBatch, pool: StatePool, state: LayerState, choices: Mapping[LayerOp, Choice]
) -> None:
    """Run the convolution, KDA and the norm of every table of the step. Raises as `rapidkda.ops` does."""
    tokens = _tokens(inputs, pool)
    common: dict[str, Any] = {"state": state.recurrent, "pad_slot": pool.pad_slot}
    # A backend that norms what it prefills leaves the rows of the other tables; else all rows are normed at once.
    fuses = inputs.fuse and _fuses(choices["prefill"].name)
    norms_apart = batch.prefill is not None and fuses
    if batch.prefill is not None:
        _prefill(inputs, batch.prefill, pool, state, choices, norms_apart)
    if batch.decode is not None:
        table = batch.decode
        _convolve(inputs, table, pool, state, choices)
        _settle(table, pool, state, choices)
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
            held=state.held,
            backend=choices["verify_slots" if state.records is None else "verify"],
        )
    if not norms_apart:
        _norm(inputs, None, choices)
        return
    for rest in (batch.decode, batch.verify):
        if rest is not None:
            _norm(inputs, rest.segments, choices)


@functools.cache
def _fuses(backend: str) -> bool:
    """Asking a protocol takes microseconds."""
    return isinstance(load(backend), FusingBackend)


def _norm(inputs: CoreInputs, segments: Segments | None, choices: Mapping[LayerOp, Choice]) -> None:
    """The gated norm of the rows of a table, or of all rows."""
    norm, out = inputs.norm, inputs.out
    if norm is not None:
        backend = choices["norm"]
        ops.gated_rms_norm(out, norm.z, norm.weight, norm.eps, segments=segments, out=out, backend=backend)


def _prefill(
    inputs: CoreInputs,
    table: RowTable,
    pool: StatePool,
    state: LayerState,
    choices: Mapping[LayerOp, Choice],
    norms: bool,
) -> None:
    """Convolve prefills and run them; `norms`: and norm them."""
    _settle(table, pool, state, choices)
    exports, shape = table.checkpoints is not None, pool.shape
    norm = inputs.norm if norms else None
    ops.prefill_layer(
        inputs.x,
        inputs.g,
        inputs.beta,
        segments=table.segments,
        heads=shape.heads,
        conv_weight=inputs.conv_weight,
        z=None if norm is None else norm.z,
        norm_weight=None if norm is None else norm.weight,
        norm_eps=1e-5 if norm is None else norm.eps,
        state=state.recurrent,
        conv_state=state.conv,
        slots=table.slots,
        read_slots=table.read_slots,
        conv_read_slots=table.conv_read_slots,
        has_initial_state=table.has_initial_state,
        accepted=table.accepted if table.settles else None,
        channels_last=shape.conv_channels_last,
        conv_out=inputs.conv_out,
        out=inputs.out,
        pad_slot=pool.pad_slot,
        checkpoints=table.checkpoints,
        checkpoint_pool=state.recurrent if exports else None,
        conv_checkpoint_pool=state.conv if exports else None,
        workspace=inputs.scratch,
        fuse=inputs.fuse,
        backend=choices["prefill"],
        neighbour_backend=choices["conv"],
        **inputs.gate,
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


def _convolve(
    inputs: CoreInputs, table: RowTable, pool: StatePool, state: LayerState, choices: Mapping[LayerOp, Choice]
) -> None:
    """Convolve decodes."""
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
        backend=choices["conv"],
    )


def _settle(table: RowTable, pool: StatePool, state: LayerState, choices: Mapping[LayerOp, Choice]) -> None:
    """Fold the accepted records of requests that leave speculation into their states."""
    if table.settles and state.records is not None:
        ops.commit(
            state=state.recurrent,
            records=state.records,
            slots=table.slots,
            accepted=table.accepted,
            held=state.held,
            pad_slot=pool.pad_slot,
            backend=choices["verify"],
        )


def _convolve_drafts(
    inputs: CoreInputs, table: VerifyTable, pool: StatePool, state: LayerState, choices: Mapping[LayerOp, Choice]
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
