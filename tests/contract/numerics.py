"""Numerics of the chunked form and of the gate."""

from __future__ import annotations

import math

import torch

from rapidkda.reference import l2_normalize
from rapidkda.testing import REGIMES, SMALL, Shape, activated, make_inputs, worst_output_error, worst_state_error
from rapidkda.testing.regimes import logit

from .cases import case
from .guards import StatePool, check_run, fail, run_prefill, set_rows, within
from .target import Target

WEAK = -0.01
SHAPES = {shape.name: shape for shape in SMALL}


@case("shapes", shape=SHAPES, regime=("fast", "slow"))
def every_shape(target: Target, shape: str, regime: str) -> None:
    """Small shapes with every kind of tail, from strided slices with NaN rows between the segments."""
    if target.interpreted and SHAPES[shape].tokens > 100:
        shape = "three_heads"
    inputs = make_inputs(SHAPES[shape], regime, dtype=target.dtype, device=target.device, layout="fused", gaps=True)
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("regimes", regime=REGIMES, dtype=(torch.float32, torch.bfloat16, torch.float16))
def every_regime(target: Target, regime: str, dtype: torch.dtype) -> None:
    """The accuracy bars of each gate regime."""
    shape = Shape("regime", (target.tokens(160), target.tokens(75)), 2)
    inputs = make_inputs(shape, regime, dtype=dtype, device=target.device, seed=5)
    check_run(run_prefill(target, inputs), inputs, target.bar(regime, dtype))


@case("options", neg=(False, True), state_dtype=(torch.float32, torch.bfloat16), scale=(None, 0.3))
def every_option(target: Target, neg: bool, state_dtype: torch.dtype, scale: float | None) -> None:
    """Negative eigenvalues, bfloat16 states, another scale, float32 gate and beta beside the dtype of q."""
    shape = Shape("options", (35, 18), 2)
    inputs = make_inputs(
        shape, "slow", dtype=target.dtype, device=target.device, g_dtype=torch.float32, beta_dtype=torch.float32, seed=6
    )
    inputs.allow_neg_eigval, inputs.scale = neg, scale
    run = run_prefill(target, inputs, state_dtype=state_dtype)
    check_run(run, inputs, target.case_bar(state_dtype))


@case("B01", tokens=(16, 130, 512))
def one_token_repeated(target: Target, tokens: int) -> None:
    """Keys and queries that are all the same unit vector: the triangular inverse must not be formed by powers."""
    inputs = activated([target.tokens(tokens)], -1e-4, heads=1, dtype=target.dtype, device=target.device)
    unit = l2_normalize(target.normal(128, seed=1))
    set_rows(inputs, "k", unit)
    set_rows(inputs, "q", unit)
    set_rows(inputs, "beta", 0.9997)
    check_run(run_prefill(target, inputs, fresh=[0]), inputs, target.case_bar())


@case("B02")
def correlated_keys(target: Target) -> None:
    """Keys a tenth away from one direction, hardly any decay."""
    inputs = activated([target.tokens(256)], heads=2, dtype=target.dtype, device=target.device, seed=2)
    unit = l2_normalize(target.normal(128, seed=1))
    noise = target.normal(*inputs.k.shape, seed=3).double() / math.sqrt(128)
    inputs.k.copy_(l2_normalize(unit + 0.1 * noise))
    inputs.g.copy_(-0.01 - 0.04 * torch.rand(inputs.g.shape, generator=target.generator(4), device=target.device))
    set_rows(inputs, "beta", 0.98)
    check_run(run_prefill(target, inputs, fresh=[0]), inputs, target.case_bar())


@case("B04", log_decay=(-0.5, -1.0, -2.0, -2.5, -2.7, -3.0, -5.0))
def constant_gate(target: Target, log_decay: float) -> None:
    """Exponents of a whole chunk must not leave the range of the number format."""
    inputs = activated([64], log_decay, dtype=target.dtype, device=target.device)
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("B05", log_decay=(-6.0, -20.0, -300.0))
def gate_below_every_bound(target: Target, log_decay: float) -> None:
    """Log decays given by the caller have no floor: constant -6 and -20, and a single -300 among weak ones."""
    inputs = activated([64], max(log_decay, -20.0), dtype=target.dtype, device=target.device)
    if log_decay == -300.0:
        set_rows(inputs, "g", WEAK)
        inputs.g[7] = log_decay
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("B05", log_decay=(-20.0, -300.0), op=("decode", "slots", "replay", "deferred"))
def gate_below_every_bound_in_one_step(target: Target, log_decay: float, op: str) -> None:
    """The same for one step from a filled state: what is forgotten is gone, nothing overflows."""
    inputs = activated([1, 1], log_decay, dtype=target.dtype, device=target.device)
    inputs.g[1, :, ::2] = WEAK
    pool = StatePool(target, 6, inputs)
    pool.put_states([3, 1], inputs.states)
    out = target.advance(op, inputs, state=pool.view, slots=target.index([3, 1]))
    want_out, want = inputs.expected()
    within("outputs", worst_output_error(out, want_out, inputs.spans), target.case_bar().out)
    within("states", worst_state_error(pool.states([3, 1]), want), target.case_bar().state)


@case("B10")
def strongest_gate_with_poison_after_the_end(target: Target) -> None:
    """Log decay -5 everywhere and one token past a chunk: the last row is the true last token, not the padding."""
    inputs = activated([target.tokens(65), 17], -5.0, dtype=target.dtype, device=target.device, gaps=True)
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("B06")
def softplus_gate_of_both_extremes(target: Target) -> None:
    """The unbounded gate with channels that forget at once beside channels that never do."""
    inputs = make_inputs(Shape("B06", (64,), 2), "unbounded", dtype=target.dtype, device=target.device)
    inputs.A_log = torch.full((2,), math.log(16.0), device=target.device)
    inputs.dt_bias = torch.zeros(2, 128, device=target.device)
    inputs.g[..., ::2], inputs.g[..., 1::2] = 10.0, -10.0
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("B09", amplitude=(100.0, -100.0))
def saturated_gate(target: Target, amplitude: float) -> None:
    """A learned amplitude that overflows must not meet a zero logit as infinity times zero."""
    inputs = make_inputs(Shape("B09", (20,), 2), "fast", dtype=target.dtype, device=target.device)
    inputs.A_log = torch.full((2,), amplitude, device=target.device)
    inputs.dt_bias = torch.full((2, 128), 0.5, device=target.device)
    set_rows(inputs, "g", -0.5)  # logit exactly 0: log decay lower_bound / 2
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("B09", logits=(1e4, -1e4))
def gate_logits_far_out(target: Target, logits: float) -> None:
    """Huge gate logits mean the bound itself, or no decay at all."""
    inputs = make_inputs(Shape("B09", (20,), 2), "fast", dtype=target.dtype, device=target.device)
    inputs.A_log, inputs.dt_bias = None, None
    set_rows(inputs, "g", logits)
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("gate")
def absent_gate_parameters(target: Target) -> None:
    """A bounded gate without A_log and dt_bias: amplitude 1 and bias 0. A_log also comes as [1, 1, HV, 1]."""
    inputs = make_inputs(Shape("absent", (20,), 2), "slow", dtype=target.dtype, device=target.device)
    bias, inputs.A_log, inputs.dt_bias = inputs.dt_bias, None, None
    check_run(run_prefill(target, inputs), inputs, target.case_bar())
    if bias is not None:
        inputs.A_log, inputs.dt_bias = torch.full((1, 1, 2, 1), 0.7, device=target.device), bias.flatten()
    check_run(run_prefill(target, inputs), inputs, target.case_bar())


@case("B11", op=("prefill", "decode", "slots", "replay", "deferred"), logit_of=(0.001, 0.5, 0.731))
def write_strength(target: Target, op: str, logit_of: float) -> None:
    """One write of known strength: float32 logits stay float32, and the sigmoid is applied exactly once."""
    inputs = activated([1], 0.0, heads=1, dtype=target.dtype, device=target.device)
    inputs.scale, inputs.raw_beta = 1.0, True
    for name in ("q", "k", "v"):
        set_rows(inputs, name, 0.0)
    inputs.q[0, 0, 0] = inputs.k[0, 0, 0] = 1.0
    inputs.beta.fill_(logit(1.0 - logit_of))
    pool = StatePool(target, 4, inputs)
    pool.view[2] = 0.0
    pool.view[2, 0, :, 0] = 1.0  # V-first: key row 0 holds ones
    out = target.advance(op, inputs, state=pool.view, slots=target.index([2]))
    worst = float((out.double() - logit_of).abs().max()) / logit_of
    within(f"what is left of the state after a write of strength {1 - logit_of}", worst, 0.01)


@case("B14")
def nan_stays_in_its_sequence(target: Target) -> None:
    """A NaN in one sequence reaches no other, and its slot is clean once it is used afresh."""
    lens = [target.tokens(70), 20]
    inputs = activated(lens, WEAK, dtype=target.dtype, device=target.device)
    clean = run_prefill(target, inputs)
    inputs.v[lens[0] + 5] = float("nan")
    dirty = run_prefill(target, inputs)
    if not torch.equal(dirty.out[: lens[0]], clean.out[: lens[0]]):
        fail("a NaN in sequence 1 changed the outputs of sequence 0")
    if not torch.equal(dirty.pool.states(dirty.slots[:1]), clean.pool.states(clean.slots[:1])):
        fail("a NaN in sequence 1 changed the state of sequence 0")
    again = activated([9], WEAK, dtype=target.dtype, device=target.device, seed=8)
    out = target.prefill(
        again,
        state=dirty.pool.view,
        slots=target.index([dirty.slots[1]]),
        has_initial_state=target.index([False], torch.bool),
    )
    dirty.out, dirty.slots = out, [dirty.slots[1]]
    want_out, want_state = again.expected(states=torch.zeros_like(again.states))
    within("outputs of the new tenant", float((out.cpu() - want_out).norm() / want_out.norm()), target.case_bar().out)
    got = dirty.pool.states(dirty.slots).double().cpu()
    within("state of the new tenant", float((got - want_state).norm() / want_state.norm()), target.case_bar().state)
