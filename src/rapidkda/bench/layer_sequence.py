"""The reference system's sequence of operations around a packed prefill kernel, re-created on a backend of ours.

Gather each kind's tokens, make q, k, v and g contiguous, gather the states, run, scatter the states, and copy the
outputs back to their rows. Prefills and decodes are one packed call, verifications another, with slot per position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..dispatch import Choice
from ..segments import Segments
from ..serving.backends import LayerOp
from .layer_inputs import EPS, Bound, StepInputs, fill_pool, make_pool


@dataclass(slots=True, eq=False)
class _Part:
    """The requests of one kind of call: their token rows, packed segments and slots."""

    rows: Tensor
    segments: Segments
    slots: Tensor  # [N, 1 + k_max]

    @staticmethod
    def of(inputs: StepInputs, members: Sequence[int], slots: Sequence[tuple[int, ...]]) -> _Part:
        device = inputs.x.device
        lengths = [tokens for _, tokens in inputs.step.requests]
        starts = [sum(lengths[:index]) for index in members]
        rows = [torch.arange(start, start + lengths[index]) for start, index in zip(starts, members)]
        return _Part(
            torch.cat([*rows, torch.arange(0)]).to(device),
            Segments.from_lengths([lengths[index] for index in members], device),
            torch.tensor([slots[index] for index in members], dtype=torch.int32, device=device),
        )

    def gather(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Convolution inputs, gate logits and write strengths of these rows, as copies."""
        x, g, beta = (tensor.index_select(0, self.rows) for tensor in (inputs.x, inputs.g, inputs.beta))
        return x, g, beta


def reference_sequence(inputs: StepInputs, choices: Mapping[LayerOp, Choice]) -> Bound:
    """The sequence on a step. A pure step needs no gather and writes straight into the output."""
    kinds = [kind for kind, _ in inputs.step.requests]
    pool, slots = make_pool(inputs, "slots")
    state = pool.layers[0]
    plain = _Part.of(inputs, [i for i, kind in enumerate(kinds) if kind != "verify"], slots)
    drafts = _Part.of(inputs, [i for i, kind in enumerate(kinds) if kind == "verify"], slots)
    mixed = drafts.segments.count > 0
    out = torch.empty(inputs.z.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    plain_out = torch.empty_like(out[: len(plain.rows)]) if mixed else out
    has_state = torch.ones(plain.segments.count, dtype=torch.bool, device=out.device)
    order = torch.arange(plain.segments.count, dtype=torch.int32, device=out.device)
    none = torch.zeros(drafts.segments.count, dtype=torch.int32, device=out.device)

    def convolve(x: Tensor, part: _Part, accepted: Tensor | None) -> list[Tensor]:
        mixed_qkv = ops.causal_conv(
            x,
            inputs.conv_weight,
            segments=part.segments,
            state=state.conv,
            slots=part.slots[:, 0],
            accepted=accepted,
            keep_all=accepted is not None,
            channels_last=True,
            backend=choices["conv"],
        )
        return [qkv.unflatten(1, inputs.g.shape[1:]) for qkv in mixed_qkv.chunk(3, dim=1)]

    def prefill(x: Tensor, g: Tensor, beta: Tensor) -> None:
        q, k, v = (qkv.contiguous() for qkv in convolve(x, plain, None))
        resting = plain.slots[:, 0].long()
        gathered = torch.where(has_state[:, None, None, None], state.recurrent.index_select(0, resting), 0.0)
        ops.prefill(
            q,
            k,
            v,
            g.contiguous(),
            beta,
            segments=plain.segments,
            state=gathered,
            slots=order,
            out=plain_out,
            backend=choices["prefill"],
            **inputs.gate,
        )
        state.recurrent.index_copy_(0, resting, gathered)

    def verify(x: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v = convolve(x, drafts, none)
        return ops.verify(
            q,
            k,
            v,
            g,
            beta,
            segments=drafts.segments,
            state=state.recurrent,
            slots=drafts.slots,
            accepted=none,
            backend=choices["verify_slots"],
            **inputs.gate,
        )

    def call() -> None:
        if mixed:
            prefill(*plain.gather(inputs))
            draft_out = verify(*drafts.gather(inputs))
            out.index_copy_(0, plain.rows, plain_out)
            out.index_copy_(0, drafts.rows, draft_out)
        else:
            prefill(inputs.x, inputs.g, inputs.beta)
        ops.gated_rms_norm(out, inputs.z, inputs.norm_weight, EPS, out=out, backend=choices["norm"])

    def reset() -> None:
        out.fill_(float("nan"))
        plain_out.fill_(float("nan"))
        fill_pool(pool, slots, inputs)

    return Bound(call, out, reset, lambda index: state.recurrent[slots[index][0]])
