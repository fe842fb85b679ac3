"""Where a part of a segment may forget what came before it: the bound, and what the kernels make of it."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rapidkda import ops, reference
from rapidkda.backends.base import Request
from rapidkda.backends.cuda import CudaBackend
from rapidkda.backends.cuda.host import prefill as host
from rapidkda.backends.cuda.host.plan import CHUNK, FormName, Plan, Scratch
from rapidkda.device import Device
from rapidkda.ops import kinds
from rapidkda.segments import Checkpoints, Segments
from rapidkda.testing import Inputs, Shape, activated, bar, make_inputs, worst_output_error, worst_state_error

FORGOTTEN, MOST_WARM_UP = 2.0**-126, 8  # as csrc/seams.cuh has them
REMEMBERS, NOT_WALKED, LOG2_LEAST = -1, -2, -8.0


def step_bound(y: Tensor, k: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Column sums [..., K] of the magnitudes of (what follows) times one token's transition."""
    k, beta = k.abs(), beta[..., None]
    s = (k * y).sum(-1, keepdim=True)
    return decay * ((1 - beta * k * k).abs() * y + beta.abs() * k * s)


@given(
    seed=st.integers(0, 2**16),
    tokens=st.integers(1, 12),
    slowest=st.sampled_from([0.0, -0.1, -2.0]),
    norm=st.sampled_from([0.1, 1.0, 1.4, 5.0]),
    strength=st.sampled_from([0.5, 1.0, 2.0, -1.0]),
)
@settings(max_examples=100, deadline=None)
def test_the_bound_holds_for_every_input(seed: int, tokens: int, slowest: float, norm: float, strength: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = 8
    a, y = torch.eye(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    for _ in range(tokens):  # backwards
        k = torch.randn(size, generator=generator, dtype=torch.float64)
        k *= norm / k.norm()
        decay = (slowest - 5 * torch.rand(size, generator=generator, dtype=torch.float64)).exp()
        decay[int(torch.randint(size, (), generator=generator))] = 1.0  # one channel is always open
        beta = torch.tensor(strength, dtype=torch.float64)
        a = a @ (torch.eye(size, dtype=torch.float64) - beta * torch.outer(k, k)) @ torch.diag(decay)
        y = step_bound(y, k, decay, beta)
        assert bool((a.abs().sum(0) <= y * (1 + 1e-12)).all())


def on_hopper() -> str:
    """Why the kernels cannot run here, or an empty string."""
    if not torch.cuda.is_available() or importlib.util.find_spec("cuda.core") is None:
        return "needs a GPU and cuda-core"
    return "; ".join(CudaBackend().unmet(Request("prefill", Device.of(torch.device("cuda")))))


hopper = pytest.mark.skipif(bool(on_hopper()), reason=on_hopper() or "runs here")
PARTS: list[tuple[FormName, int]] = [("parallel", 2), ("parallel", 4)]


def run(
    inputs: Inputs, form: FormName, parts: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states and seams [N, 2 P, HV] of a call in place on a pool."""
    monkeypatch.setattr(host, "plan", lambda call, sms: Plan(form, parts, 0.0, ()))
    kinds.forget()  # they hold plans
    checkpoints = options["checkpoints"].slot.shape[0] if "checkpoints" in options else 0
    scratch = Scratch(len(inputs.spans), inputs.v.shape[0], inputs.v.shape[1], parts, checkpoints)
    workspace = torch.full((scratch.bytes + (1 << 24),), 0xA5, dtype=torch.uint8, device=inputs.q.device)
    pool = inputs.states.clone()
    out = torch.full(inputs.v.shape, float("nan"), dtype=torch.bfloat16, device=inputs.q.device)
    ops.prefill(
        *inputs.operands(),
        **inputs.options(),
        segments=inputs.segments,
        state=pool,
        slots=torch.arange(len(inputs.spans), device=inputs.q.device),
        out=out,
        workspace=workspace,
        backend="cuda",
        **options,
    )
    found = workspace[scratch.places[-1] : scratch.bytes].view(torch.int32)
    return out, pool, found.view(len(inputs.spans), 2 * parts, inputs.v.shape[1]).cpu()


def first_chunks(chunks: int, halves: int) -> list[int]:
    """Where the halves of a walked head's parts begin, as csrc/parts.cuh has it."""
    warm_up, stored = 4, 2
    share = -(-(chunks + (halves - 1) * warm_up + halves // 2 * stored) // halves)
    lengths = [share, share - warm_up - stored] + [share - warm_up, share - warm_up - stored] * (halves // 2 - 1)
    if share < 2 * (warm_up + stored):
        lengths = [-(-chunks // halves)] * halves
    return [min(sum(lengths[:half]), chunks) for half in range(halves)]


def expected_seams(inputs: Inputs, halves: int) -> tuple[Tensor, Tensor]:
    """Seams [N, halves, HV] in float64, with the threshold a hundredth lower and higher; half 0 has none."""
    group = inputs.v.shape[1] // inputs.k.shape[1]
    k, g, beta = (x.cpu().double() for x in (inputs.k, inputs.g, inputs.beta))
    if inputs.raw_keys:
        k = reference.l2_normalize(k)
    k = k.repeat_interleave(group, 1)
    if inputs.raw_gate:
        A_log, dt_bias = (None if x is None else x.cpu().double() for x in (inputs.A_log, inputs.dt_bias))
        g = reference.gate_log_decay(g, A_log, dt_bias, inputs.lower_bound)
    if inputs.raw_beta:
        beta = beta.sigmoid() * (2 if inputs.allow_neg_eigval else 1)
    found = torch.full((2, len(inputs.spans), halves, inputs.v.shape[1]), -1, dtype=torch.int32)
    for n, (first, length) in enumerate(inputs.spans):
        chunks = -(-length // CHUNK)
        begins = first_chunks(chunks, halves)
        for half in range(1, halves):
            begin = begins[half]
            y = torch.ones(inputs.v.shape[1], k.shape[2], dtype=torch.float64)
            open_ = torch.ones(2, inputs.v.shape[1], dtype=torch.bool)
            for i in range(min(begin, MOST_WARM_UP)):
                for token in reversed(range((begin - i - 1) * CHUNK, min((begin - i) * CHUNK, length))):
                    at = first + token
                    y = step_bound(y, k[at], g[at].exp(), beta[at])
                for which, factor in enumerate((0.99, 1.01)):
                    done = open_[which] & (y.amax(-1) < FORGOTTEN * factor)
                    found[which, n, half][done] = i + 1
                    open_[which] &= ~done & (y.amax(-1) < 2.0 ** (-8 * (i + 1)) * factor)
    return found[0], found[1]


def expected_walks(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Whether each head [N, 1, HV] is walked: all channels decay enough in a chunk in its middle. The threshold a
    hundredth higher and lower."""
    g = inputs.g.cpu().double()
    if inputs.raw_gate:
        A_log, dt_bias = (None if x is None else x.cpu().double() for x in (inputs.A_log, inputs.dt_bias))
        g = reference.gate_log_decay(g, A_log, dt_bias, inputs.lower_bound)
    sums = []
    for first, length in inputs.spans:
        middle = -(-length // CHUNK) // 2 * CHUNK
        sums.append(g[first + middle : first + min(middle + CHUNK, length)].sum(0).amax(-1) / math.log(2))
    found = torch.stack(sums)[:, None]
    return found < LOG2_LEAST * 0.99, found < LOG2_LEAST * 1.01


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("form", "parts"), PARTS)
@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32], ids=["g16", "g32"])
@pytest.mark.parametrize("regime", ["fast", "slow", "staggered", "unbounded"])
def test_seams_are_those_of_the_bound(
    form: FormName, parts: int, g_dtype: torch.dtype, regime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape("ragged", (700, 333, 64, 17, 1, 0, 150), 2, 4)
    inputs = make_inputs(
        shape, regime, dtype=torch.bfloat16, device="cuda", seed=4, layout="fused", gaps=True, g_dtype=g_dtype
    )
    out, final, seams = run(inputs, form, parts, monkeypatch)
    low, high = expected_seams(inputs, 2 * parts)
    may, must = expected_walks(inputs)
    right = torch.where(seams == NOT_WALKED, ~must, may & ((seams == low) | (seams == high)))
    assert bool(right[:, 1:].all()), (seams[~right], low[~right])
    assert bool((seams >= 0).any()) == (regime == "fast")
    want, state = inputs.expected()
    limit = bar(regime, torch.bfloat16)
    assert worst_output_error(out, want, inputs.spans) <= 1e-2  # one row has too few terms to average rounding
    assert worst_state_error(final, state) <= limit.state


def forgetful(length: int = 256, log_decay: float = -8.0) -> Inputs:
    """Every channel decays by the same factor a token; keys are normalised in the kernel."""
    inputs = activated((length,), log_decay, dtype=torch.bfloat16, device="cuda", seed=9)
    inputs.raw_keys = True
    return inputs


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("form", "parts"), PARTS)
def test_one_open_channel_keeps_the_exact_way(form: FormName, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = forgetful()
    assert bool((run(inputs, form, parts, monkeypatch)[2][:, 1:] >= 0).all())
    inputs.g[:, 1, 77] = 0.0
    inputs.k[..., 77] = 0.0  # nothing writes over it
    inputs.states[:, 1, :, 77] = 1e6
    inputs.q[..., 77] = 0.1
    out, final, seams = run(inputs, form, parts, monkeypatch)
    assert bool((seams[..., 1] == NOT_WALKED).all())
    assert bool((seams[:, 1:, 0] >= 0).all()), "the other head is not held up"
    want, state = inputs.expected()
    assert worst_output_error(out, want, inputs.spans) <= bar("slow", torch.bfloat16).out
    assert worst_state_error(final, state) <= bar("slow", torch.bfloat16).state


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("form", "parts"), PARTS)
@pytest.mark.parametrize(("strength", "log_decay"), [(2.0, -1.0), (2.0, -8.0), (-1.0, -2.0), (0.0, -1.5)])
def test_write_strengths_count(
    form: FormName, parts: int, strength: float, log_decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strengths outside (0, 1) too: the seams are those of the bound, the results those of float64."""
    inputs = forgetful(256, log_decay)
    inputs.beta = torch.full_like(inputs.beta, strength)
    out, final, seams = run(inputs, form, parts, monkeypatch)
    low, high = expected_seams(inputs, 2 * parts)
    assert bool(((seams == low) | (seams == high))[:, 1:].all())
    want, state = inputs.expected()
    assert worst_output_error(out, want, inputs.spans) <= bar("fast", torch.bfloat16).out
    assert worst_state_error(final, state) <= bar("fast", torch.bfloat16).state


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("form", "parts"), PARTS)
def test_warm_ups_export_nothing(form: FormName, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints before, at and behind the seams are those of the parts that own them."""
    inputs = make_inputs(Shape("t", (512,), 2), "fast", dtype=torch.bfloat16, device="cuda", seed=7)
    offsets = [16, 96, 112, 128, 144, 240, 256, 272, 384, 512]
    table = Checkpoints.build([(0, offset, row) for row, offset in enumerate(offsets)], 1, torch.device("cuda"))
    exported = torch.full((len(offsets), *inputs.states.shape[1:]), float("nan"), device="cuda")
    seams = run(inputs, form, parts, monkeypatch, checkpoints=table, checkpoint_pool=exported)[2]
    assert bool((seams[:, 1:] > 0).all())
    for row, offset in enumerate(offsets):
        cut = replace(
            inputs,
            **{name: getattr(inputs, name)[:offset] for name in ("q", "k", "v", "g", "beta")},
            segments=Segments.from_lengths([offset], torch.device("cuda")),
        )
        assert worst_state_error(exported[row : row + 1], cut.expected()[1]) <= bar("fast", torch.bfloat16).state, (
            offset
        )


@hopper
@pytest.mark.gpu
def test_keys_as_they_are_forget_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer keys could bring back after the seam what was nothing at it."""
    inputs = forgetful()
    inputs.raw_keys = False
    out, final, seams = run(inputs, "parallel", 4, monkeypatch)
    assert bool((seams == NOT_WALKED).all())
    want, state = inputs.expected()
    assert worst_output_error(out, want, inputs.spans) <= bar("fast", torch.bfloat16).out
    assert worst_state_error(final, state) <= bar("fast", torch.bfloat16).state


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("delta", [-1e-4, 1e-4])
def test_the_threshold_is_where_it_is_said_to_be(delta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys a state decays by the gates alone, and 64 tokens of 2^-(126 / 64) reach the threshold."""
    log_decay = -126 / 64 * 0.6931471805599453 * (1 + delta)
    inputs = forgetful(256, log_decay)
    inputs.k.zero_()
    seams = run(inputs, "parallel", 2, monkeypatch)[2]
    assert bool((seams[:, 2] == (4 if delta > 0 else 5)).all())


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("form", "parts"), PARTS)
def test_nans_near_a_seam_cross_it(form: FormName, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN among the tokens of a walk makes it exact; so NaNs near a seam cross it."""
    inputs = forgetful()
    inputs.k[126, 0, 5] = float("nan")  # parts begin at token 128
    out, _, seams = run(inputs, form, parts, monkeypatch)
    assert int(seams[0, parts, 0]) == REMEMBERS
    assert bool((seams[:, 1:, 1] >= 0).all())
    assert bool(out[128:144, 0].isnan().all())
    assert bool(out[:, 1].isfinite().all())
