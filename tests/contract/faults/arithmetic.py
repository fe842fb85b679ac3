"""Faults of the activations and of the chunked form."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from rapidkda.problem import DecodeCall, Gate, PrefillCall

from .install import KDA, KdaCall, textbook_fault, with_gate, with_tokens, wraps
from .textbook import log_decay, write_strength


@wraps(*KDA, caught_by=("B11",))
def beta_never_through_the_sigmoid(original: Any, call: KdaCall) -> None:
    original(with_tokens(call, beta_logits=False))


@wraps(*KDA, caught_by=("B11",))
def beta_twice_through_the_sigmoid(original: Any, call: KdaCall) -> None:
    original(with_tokens(call, beta=torch.sigmoid(call.tokens.beta)))


@wraps(*KDA, caught_by=("B11",))
def beta_rounded_to_bfloat16(original: Any, call: KdaCall) -> None:
    rounded = write_strength(call.tokens).bfloat16().float()
    original(with_tokens(call, beta=rounded, beta_logits=False))


@wraps(*KDA, caught_by=("options",))
def negative_eigenvalues_ignored(original: Any, call: KdaCall) -> None:
    original(with_tokens(call, beta_scale=1.0))


@wraps(*KDA, caught_by=("options",))
def scale_ignored(original: Any, call: KdaCall) -> None:
    original(with_tokens(call, scale=call.tokens.key_dim**-0.5))


@wraps(*KDA, caught_by=("regimes-every_regime[regime=slow",))
def dt_bias_ignored(original: Any, call: KdaCall) -> None:
    original(with_gate(call, dt_bias=None))


@wraps("prefill", caught_by=("regimes-every_regime[regime=fast",))
def gate_amplitude_ignored(original: Any, call: PrefillCall) -> None:
    original(with_gate(call, A_log=None))


@wraps("decode", caught_by=("decode-every_regime_of_one_step[regime=unbounded",))
def gate_amplitude_ignored_in_decode(original: Any, call: DecodeCall) -> None:
    original(with_gate(call, A_log=None))


@wraps(*KDA, caught_by=("shapes", "decode-batch_sizes"))
def keys_and_queries_not_normalised(original: Any, call: KdaCall) -> None:
    original(with_tokens(call, l2norm=False))


@wraps(*KDA, caught_by=("B09",))
def infinite_amplitude_meets_a_zero_logit(original: Any, call: KdaCall) -> None:
    gate = call.tokens.gate
    if gate.kind != "bounded" or gate.A_log is None:
        return original(call)
    x = call.tokens.g.float() + (0.0 if gate.dt_bias is None else gate.dt_bias)
    g = gate.lower_bound * torch.sigmoid(gate.A_log.exp().unsqueeze(-1) * x)
    return original(with_tokens(call, g=g, gate=Gate("log_decay")))


textbook_fault("inverse_by_powers_in_float16", "B01", "B02", power_inverse=True)
textbook_fault("exponents_anchored_in_the_middle", "B08", anchor=7, half_factors=True)
textbook_fault("exponents_anchored_at_the_start", "B05", "B06", anchor=0)
textbook_fault("rows_past_the_end_not_masked", "B16", "B20", unmasked_tail=True)
textbook_fault(
    "state_thought_forgotten_by_summed_gates", "regimes-every_regime[regime=staggered", summed_gate_bound=True
)


@wraps("decode", caught_by=("decode-layouts_and_state_dtypes",))
def decay_after_the_delta_rule(original: Any, call: DecodeCall) -> None:
    late = log_decay(call.tokens).exp()
    original(with_tokens(call, g=torch.zeros_like(call.tokens.g), gate=Gate("log_decay")))
    for first, slot in zip(call.segments.host_values()[0].tolist(), call.write_slots.tolist(), strict=True):
        call.pool[slot] *= late[first].unsqueeze(1 if call.state_v_first else 2).to(call.pool.dtype)


@wraps(*KDA, caught_by=("shapes",))
def operands_rounded_to_bfloat16(original: Any, call: KdaCall) -> None:
    tokens = call.tokens
    original(with_tokens(call, **{name: getattr(tokens, name).bfloat16().to(tokens.q.dtype) for name in ("q", "k")}))


@wraps("prefill", caught_by=("shapes", "B36"))
def one_head_two_percent_off(original: Any, call: PrefillCall) -> None:
    original(call)
    call.out[:, -1] *= 1.02


_runs = itertools.count()


@wraps("prefill", caught_by=("B19", "B29"))
def different_bits_every_run(original: Any, call: PrefillCall) -> None:
    original(call)
    call.out.mul_(1 + 1e-6 * (next(_runs) % 5))  # never twice the same in a row


@wraps("prefill", caught_by=("B94",))
def every_sequence_searches_the_whole_table(original: Any, call: PrefillCall) -> None:
    original(call)
    sum(range(50 * call.segments.count**2))


@wraps("decode", caught_by=("B13",))
def float32_state_rounded_every_step(original: Any, call: DecodeCall) -> None:
    original(call)
    rows = call.write_slots.long()
    call.pool[rows] = call.pool[rows].bfloat16().to(call.pool.dtype)
