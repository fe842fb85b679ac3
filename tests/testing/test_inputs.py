"""Workloads, regimes, inputs and errors: that they are what their names say."""

from __future__ import annotations

import math

import pytest
import torch

from rapidkda import reference
from rapidkda.testing import (
    PREFILL,
    REGIMES,
    SMALL,
    Shape,
    activated,
    bar,
    by_name,
    carried_bar,
    case_bar,
    decode_shape,
    make_inputs,
    regime,
    relative_error,
    worst_output_error,
    worst_state_error,
)

SHAPE = Shape("test", (40, 0, 25), 2, value_heads=4, key_dim=32, value_dim=16)


def decays(name: str, shape: Shape = SHAPE) -> torch.Tensor:
    inputs = make_inputs(shape, name)
    return reference.gate_log_decay(inputs.g, inputs.A_log, inputs.dt_bias, inputs.lower_bound)


def test_regimes_decay_as_they_say() -> None:
    assert -0.004 < float(decays("slow").median()) < -0.001
    assert float(decays("fast").mean()) < -2.0
    mixed = decays("mixed")
    assert float(mixed[..., ::2].mean()) > -0.01 > -1.0 > float(mixed[..., 1::2].mean())
    assert -1e-4 < float(decays("collinear").min()) < 0
    unbounded = decays("unbounded", Shape("many", (400,), 16))
    assert -5.0 < float(unbounded.mean()) < -0.05
    assert regime("unbounded").lower_bound is None


def test_collinear_keys_are_one_key() -> None:
    k = make_inputs(SHAPE, "collinear").k
    assert torch.equal(k, k[:1].expand_as(k))


def test_staggered_mass_survives_where_no_channel_stays_open() -> None:
    """The product of summed gates says that nothing is left after 16 tokens; the truth is that much is."""
    shape = Shape("staggered", (64,), 1)
    inputs = make_inputs(shape, "staggered")
    decay = reference.gate_log_decay(inputs.g, inputs.A_log, inputs.dt_bias, -5.0)
    bound = decay[:16, 0].sum(0).exp().max()
    assert float(bound) < 1e-15
    out, _ = inputs.expected()
    inputs.v[:16] = 0.0  # forget what the first 16 tokens wrote
    without, _ = inputs.expected(states=torch.zeros_like(inputs.states))
    assert worst_output_error(without, out, [(16, 8)]) > 0.1


@pytest.mark.parametrize("name", REGIMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layout_holds_the_same_values(name: str, dtype: torch.dtype) -> None:
    dense = make_inputs(SHAPE, name, dtype=dtype, seed=3)
    fused = make_inputs(SHAPE, name, dtype=dtype, seed=3, layout="fused")
    for one, two in zip(dense.operands(), fused.operands(), strict=True):
        assert torch.equal(one, two)
        assert one.is_contiguous()
        assert not two.is_contiguous()
    assert fused.q.stride(-1) == 1
    assert fused.q.untyped_storage().data_ptr() == fused.k.untyped_storage().data_ptr()


def test_gaps_hold_nan_and_the_same_answer() -> None:
    packed, scattered = make_inputs(SHAPE, "slow", seed=3), make_inputs(SHAPE, "slow", seed=3, gaps=True)
    covered = torch.zeros(scattered.q.shape[0], dtype=torch.bool)
    want, want_states = packed.expected()
    got, got_states = scattered.expected()
    for (a, n), (b, m) in zip(packed.spans, scattered.spans, strict=True):
        assert n == m
        covered[b : b + m] = True
        assert torch.equal(got[b : b + m], want[a : a + n])
    assert torch.equal(got_states, want_states)
    assert torch.isnan(scattered.q[~covered]).all()
    assert not covered.all()


def test_seeds_decide() -> None:
    one, same, other = (make_inputs(SHAPE, "slow", seed=seed).q for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_expected_of_a_selection_is_a_part_of_the_whole() -> None:
    inputs = make_inputs(SHAPE, "unbounded")
    out, states = inputs.expected()
    some_out, some_states = inputs.expected(sequences=[2], heads=[3, 0])
    first, length = inputs.spans[2]
    assert torch.equal(some_out[first : first + length], out[first : first + length][:, [3, 0]])
    assert torch.equal(some_states, states[2:, [3, 0]])


def test_activated_inputs_need_no_activation() -> None:
    inputs = activated([5, 3], -0.25, heads=2, key_dim=8, value_dim=4)
    assert torch.all(inputs.g == -0.25)
    torch.testing.assert_close(inputs.k.norm(dim=-1), torch.ones(8, 2), rtol=1e-5, atol=1e-5)
    assert not any(inputs.options()[f"use_{name}_in_kernel"] for name in ("gate", "beta_sigmoid", "qk_l2norm"))


def test_worst_head_counts_and_not_the_mean() -> None:
    want = torch.ones(6, 4, 8, dtype=torch.float64)
    got = want.clone()
    got[3:, 2] *= 1.5
    assert worst_output_error(got, want, [(0, 3), (3, 3)]) == pytest.approx(0.5)
    assert worst_output_error(got, want, [(0, 3)]) == 0.0
    states = torch.ones(2, 3, 4, 4)
    wrong = states.clone()
    wrong[1, 2] = 0.0
    assert worst_state_error(wrong, states) == pytest.approx(1.0)


def test_errors_that_are_infinite() -> None:
    one = torch.ones(3)
    assert math.isinf(relative_error(torch.tensor([1.0, float("nan"), 1.0]), one))
    assert math.isinf(relative_error(one, torch.zeros(3)))
    assert math.isinf(relative_error(one[:2], one))
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


def test_bars_are_the_published_ones() -> None:
    assert bar("fast", torch.bfloat16) == type(bar("fast", torch.bfloat16))(5.0e-3, 4.0e-3)
    assert (bar("slow", torch.bfloat16).out, bar("slow", torch.bfloat16).state) == (5.5e-3, 4.5e-3)
    assert (bar("collinear", torch.float16).out, bar("collinear", torch.float32).out) == (8e-3, 1e-5)
    assert bar("slow", torch.float32).out == bar("fast", torch.float32).state == 2e-6
    assert (case_bar(torch.bfloat16).out, case_bar(torch.bfloat16).state) == (1e-2, 5e-3)
    assert carried_bar(torch.float32, torch.float32) == case_bar(torch.float32)
    for name in REGIMES:
        assert bar(name, torch.bfloat16).out <= 8e-3


def test_workloads() -> None:
    names = [shape.name for shape in (*PREFILL, *SMALL)]
    assert len(set(names)) == len(names)
    for shape in PREFILL:
        assert by_name(shape.name) is shape
        assert shape.name.endswith(f"_h{shape.heads}")
        assert (shape.key_dim, shape.value_dim, shape.hv) == (128, 128, shape.heads)
    assert by_name("ragged_h64").tokens == 8192
    assert by_name("1x2048_h16").with_heads(2).heads == 2
    assert decode_shape(8, 4, 3).seq_lens == (4,) * 8
    with pytest.raises(ValueError, match="shape must be one of 8x2048_h16"):
        by_name("huge")
    with pytest.raises(ValueError, match="regime must be one of fast"):
        regime("hot")
