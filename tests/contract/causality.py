"""What comes later may not change what came before; how a prompt is cut may not change its result."""

from __future__ import annotations

import torch

from rapidkda import Checkpoints, Segments
from rapidkda.testing import Inputs, activated, carried_bar, worst_output_error, worst_state_error

from .cases import case
from .guards import StatePool, same_bits, within
from .target import Target

SPLITS = {
    "whole": [512],
    "quarters": [128] * 4,
    "ragged": [7, 130, 375],
    "single_tokens_first": [1] * 8 + [504],
}


def strong(target: Target, tokens: int, seed: int = 0) -> Inputs:
    inputs = activated([tokens], heads=2, dtype=target.dtype, device=target.device, seed=seed)
    inputs.g.copy_(-5.0 * target.normal(*inputs.g.shape, seed=seed + 1, dtype=torch.float32).sigmoid())
    return inputs


def outputs_and_checkpoints(target: Target, inputs: Inputs, prefix: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the first `prefix` tokens and the states at every multiple of 16 up to there."""
    offsets = range(16, prefix + 1, 16)
    pool = StatePool(target, len(offsets) + 2, inputs)
    checkpoints, target_pool = None, None
    if offsets:
        checkpoints = Checkpoints.build([(0, offset, 1 + i) for i, offset in enumerate(offsets)], 1, target.device)
        target_pool = pool.view
    states = StatePool(target, 3, inputs)
    states.put_states([1], inputs.states)
    out = target.prefill(
        inputs, state=states.view, slots=target.index([1]), checkpoints=checkpoints, checkpoint_pool=target_pool
    )
    return out[:prefix], pool.view[1:-1].clone()


@case("B08", tokens_and_prefix=((9, 8), (13, 5), (64, 40), (100, 77)), what=("g", "k", "v", "beta", "q"))
def later_values_change_nothing_before(target: Target, tokens_and_prefix: tuple[int, int], what: str) -> None:
    """Outputs and interior states before a change are bit-equal: no rescaling by anything that comes later."""
    tokens, prefix = tokens_and_prefix
    if target.interpreted:
        tokens, prefix = min(tokens, 40), min(prefix, 21)
    inputs = strong(target, tokens)
    out, states = outputs_and_checkpoints(target, inputs, prefix)
    changed = inputs.clone()
    later = getattr(changed, what)[prefix:]
    if what == "g":
        later[::2], later[1::2] = -4.999, -0.001
    elif what == "beta":
        later.copy_(1.0 - later)
    else:
        later.copy_(later.flip(0).roll(1, -1) * 0.5)
    out_changed, states_changed = outputs_and_checkpoints(target, changed, prefix)
    same_bits(f"outputs before the first changed {what}", out_changed, out)
    same_bits(f"interior states before the first changed {what}", states_changed, states)


@case("B08", tokens_and_more=((9, 4), (16, 1), (40, 30)))
def appended_tokens_change_nothing_before(target: Target, tokens_and_more: tuple[int, int]) -> None:
    """A longer prompt gives the same outputs for its beginning."""
    tokens, more = tokens_and_more
    longer = strong(target, tokens + more)
    shorter = longer.clone()
    for name in ("q", "k", "v", "g", "beta"):
        setattr(shorter, name, getattr(shorter, name)[:tokens])
    shorter = activated_like(shorter, [tokens])
    out, states = outputs_and_checkpoints(target, shorter, tokens)
    out_longer, states_longer = outputs_and_checkpoints(target, longer, tokens)
    same_bits("outputs of the common beginning", out_longer, out)
    same_bits("interior states of the common beginning", states_longer, states)


def activated_like(inputs: Inputs, lens: list[int]) -> Inputs:
    """The same kind of activated inputs with other segment lengths on the same operands."""
    return Inputs(
        *inputs.operands(),
        segments=Segments.from_lengths(lens, inputs.q.device),
        states=inputs.states,
        raw_gate=False,
        raw_beta=False,
        raw_keys=False,
        scale=inputs.scale,
    )


def in_pieces(
    target: Target, inputs: Inputs, pieces: list[int], state_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """One prompt in consecutive calls through the pool: all outputs, and the last state V-first."""
    pool = StatePool(target, 5, inputs, state_dtype)
    outputs, start = [], 0
    for piece in pieces:
        part = activated_like(inputs, [piece])
        for name in ("q", "k", "v", "g", "beta"):
            setattr(part, name, getattr(inputs, name)[start : start + piece])
        out = target.prefill(
            part,
            state=pool.view,
            slots=target.index([3]),
            has_initial_state=target.index([start > 0], torch.bool),
        )
        outputs.append(out)
        start += piece
    pool.unchanged([3])
    return torch.cat(outputs), pool.states([3])


@case("B12", slow_when_interpreted=True, split=SPLITS, state_dtype=(torch.float32, torch.bfloat16))
def chunked_prefill_equals_one_call(target: Target, split: str, state_dtype: torch.dtype) -> None:
    """However a long prompt is cut, outputs and state are those of the whole, within the bars."""
    inputs = activated([512], -0.01, dtype=target.dtype, device=target.device, seed=3)
    out, state = in_pieces(target, inputs, SPLITS[split], state_dtype)
    limit = carried_bar(target.dtype, state_dtype)
    want_out, want_state = inputs.expected(states=torch.zeros_like(inputs.states))
    within("outputs", worst_output_error(out, want_out, inputs.spans), limit.out)
    within("final state", worst_state_error(state, want_state), limit.state)


@case("B12", slow_when_interpreted=True)
def cuts_between_chunks_change_no_bit(target: Target) -> None:
    """Cut at multiples of every internal chunk, with float32 states in between: the same bits as in one call."""
    inputs = activated([512], -0.01, dtype=target.dtype, device=target.device, seed=3)
    whole, state = in_pieces(target, inputs, [512], torch.float32)
    quarters, state_quarters = in_pieces(target, inputs, [128] * 4, torch.float32)
    same_bits("outputs", quarters, whole)
    same_bits("final state", state_quarters, state)
