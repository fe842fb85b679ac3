"""The chunked form of the torch backend: accuracy, gates without a floor, causality, batching, gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from rapidkda import Segments, chunk_kda, ops, reference
from rapidkda.backends.torch import TorchBackend, prefill
from rapidkda.problem import Gate, Tokens
from rapidkda.testing.accuracy import check_prefill
from rapidkda.testing.inputs import Inputs, activated
from rapidkda.testing.regimes import REGIMES
from rapidkda.testing.shapes import SMALL, Shape
from rapidkda.testing.tolerances import case_bar, relative_error, worst_output_error, worst_state_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def run(inputs: Inputs, states: Tensor | None = None, **options: object) -> tuple[Tensor, Tensor]:
    """Outputs and final states through a pool in slot order."""
    pool = (inputs.states if states is None else states).clone()
    slots = torch.arange(pool.shape[0])
    out = torch.full(inputs.v.shape, float("nan"), dtype=inputs.v.dtype)
    keywords = {"segments": inputs.segments, "state": pool, "slots": slots, "out": out, "backend": "torch"}
    ops.prefill(*inputs.operands(), **inputs.options(), **{**keywords, **options})
    return out, pool


def assert_accurate(inputs: Inputs, out: Tensor, states: Tensor) -> None:
    want, final = inputs.expected()
    limit = case_bar(inputs.v.dtype)
    assert worst_output_error(out, want, inputs.spans) <= limit.out
    assert worst_state_error(states, final) <= limit.state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("regime", REGIMES)
def test_regimes_are_within_the_bars(regime: str, dtype: torch.dtype) -> None:
    check = check_prefill(Shape("mixed_lengths", (200, 0, 16, 77), 2), regime, dtype, CPU, "torch", seed=3)
    assert check.passed, check


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
def test_shapes_are_within_the_bars(shape: Shape) -> None:
    check = check_prefill(shape, "slow", torch.float32, CPU, "torch", seed=4)
    assert check.passed, check


@pytest.mark.parametrize("log_decay", [-6.0, -20.0, -100.0, -1e4])
def test_constant_gates_without_floor(log_decay: float) -> None:
    inputs = activated([70], log_decay)
    assert_accurate(inputs, *run(inputs))


@pytest.mark.parametrize("position", [0, 1, 7, 8, 15, 16, 63])
def test_one_closing_token_between_slow_ones(position: int) -> None:
    gate = torch.full((64, 2, 128), -0.01)
    gate[position] = -300.0
    inputs = activated([64], gate)
    assert_accurate(inputs, *run(inputs))


def test_wide_open_and_closed_channels_side_by_side() -> None:
    channel = torch.where(torch.arange(128) % 2 == 0, -160.0, -7e-4)
    inputs = activated([96], channel.expand(96, 2, 128))
    assert_accurate(inputs, *run(inputs))


def test_gate_saturates_without_nan() -> None:
    inputs = activated([4])
    bias = torch.randn(2, 128)
    for a_log, g, decay in ((100.0, -bias, -2.5), (-100.0, torch.zeros(2, 128), -2.5), (0.0, bias + 1e4, -5.0)):
        gated = dataclasses.replace(
            inputs, g=g.expand(4, 2, 128).contiguous(), A_log=torch.full((2,), a_log), dt_bias=bias,
            lower_bound=-5.0, raw_gate=True,
        )  # fmt: skip
        plain = activated([4], decay)
        assert_accurate(plain, *run(gated))


def test_outputs_do_not_depend_on_later_tokens() -> None:
    inputs = activated([77], -0.01)
    out, _ = run(inputs)
    for cut in (1, 8, 9, 16, 31, 50):
        later = inputs.clone()
        later.g[cut:] = -4.999
        for operand in (later.q, later.k, later.v):
            operand[cut:] = torch.randn_like(operand[cut:])
        later.beta[cut:] = 0.3
        assert torch.equal(run(later)[0][:cut], out[:cut])
        shorter = dataclasses.replace(inputs, segments=Segments.from_lengths([cut]))
        assert torch.equal(run(shorter)[0][:cut], out[:cut])


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_batch_mates_and_repetition_change_no_bit(heads: int) -> None:
    lens = [67, 5, 130, 64, 127]
    inputs = activated(lens, -0.02, heads=heads)
    out, states = run(inputs)
    assert all(torch.equal(a, b) for a, b in zip(run(inputs), (out, states), strict=True))
    for n, (first, length) in enumerate(inputs.spans):
        alone = dataclasses.replace(inputs, segments=Segments.from_lengths([length], first_token=[first]))
        alone_out, alone_state = run(alone, inputs.states[n : n + 1])
        assert torch.equal(alone_out[first : first + length], out[first : first + length])
        assert torch.equal(alone_state[0], states[n])


def test_nan_stays_in_its_sequence() -> None:
    inputs = activated([70, 70, 33])
    out, states = run(inputs)
    for operand in ("q", "k", "v", "g", "beta"):
        poisoned = inputs.clone()
        getattr(poisoned, operand)[75] = float("nan")
        got, got_states = run(poisoned)
        for rows, n in ((slice(0, 70), 0), (slice(140, 173), 2)):
            assert torch.equal(got[rows], out[rows])
            assert torch.equal(got_states[n], states[n])


@pytest.mark.parametrize("splits", [[128] * 4, [16, 48, 448], [7, 130, 375]])
def test_a_split_prompt_continues(splits: list[int]) -> None:
    inputs = activated([512], -0.01)
    out, states = run(inputs)
    pool, pieces, begin = inputs.states.clone(), [], 0
    for length in splits:
        part = dataclasses.replace(inputs, segments=Segments.from_lengths([length], first_token=[begin]))
        piece, pool = run(part, pool)
        pieces.append(piece[begin : begin + length])
        begin += length
    if all(length % 16 == 0 for length in splits):
        assert torch.equal(torch.cat(pieces), out)
        assert torch.equal(pool, states)
    assert relative_error(torch.cat(pieces), out.double()) < 2e-6
    assert relative_error(pool, states.double()) < 2e-6


@pytest.mark.parametrize("block", [1, prefill.CPU_BLOCK])
def test_many_short_segments_take_several_groups(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CPU_BLOCK", block)
    lens = [1 + n % 37 for n in range(90)]
    inputs = activated(lens, -0.05, heads=2, key_dim=16, value_dim=8, gaps=True)
    assert_accurate(inputs, *run(inputs))


def differentiable(dtype: torch.dtype, kind: str) -> tuple[list[Tensor], object]:
    """Small leaf tensors, and a function of them through the differentiable form and the reference alike."""
    torch.manual_seed(5)
    lens, heads, value_heads, key_dim, value_dim = [17, 0, 3], 1, 2, 5, 3
    total = sum(lens)
    shapes = [(total, heads, key_dim)] * 2 + [(total, value_heads, value_dim), (total, value_heads, key_dim)]
    leaves = [torch.randn(shape, dtype=dtype) for shape in shapes]
    leaves += [torch.randn(total, value_heads, dtype=dtype), torch.randn(3, value_heads, key_dim, value_dim).to(dtype)]
    leaves += [torch.randn(value_heads, dtype=dtype) * 0.1, torch.randn(value_heads, key_dim, dtype=dtype)]
    bound = -5.0 if kind == "bounded" else None

    def ours(*x: Tensor) -> tuple[Tensor, Tensor]:
        gate = Gate(kind, bound, x[6], x[7])  # type: ignore[arg-type]
        tokens = Tokens(*x[:5], gate, True, 2.0, True, 0.7)
        return TorchBackend().forward(tokens, Segments.from_lengths(lens), x[5], False)

    return [leaf.requires_grad_() for leaf in leaves], ours


@pytest.mark.parametrize("kind", ["bounded", "softplus"])
@pytest.mark.parametrize("small", [False, True], ids=["one_block", "many_blocks_and_groups"])
def test_gradients(kind: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        monkeypatch.setattr(prefill, "CPU_BLOCK", 1)
        monkeypatch.setattr(prefill, "CPU_STATES", 1)
    leaves, ours = differentiable(torch.float64, kind)
    assert torch.autograd.gradcheck(ours, leaves, atol=1e-6, fast_mode=True)


def test_differentiable_form_equals_the_other() -> None:
    inputs = activated([33, 70], -0.02)
    out, states = run(inputs)
    q, k, v, g, beta = (x[None] for x in inputs.operands())
    result, final = ops.chunk_kda(
        q.clone().requires_grad_(), k, v, g, beta, initial_state=inputs.states, output_final_state=True,
        state_v_first=True, cu_seqlens=torch.tensor([0, 33, 103]), backend="torch",
    )  # fmt: skip
    assert result.requires_grad
    assert relative_error(result[0], out.double()) < 1e-6
    assert relative_error(final, states.double()) < 1e-6


def test_gradient_equals_that_of_the_reference() -> None:
    torch.manual_seed(6)
    tensors = [torch.randn(1, 40, 2, 16) for _ in range(4)] + [torch.randn(1, 40, 2)]
    grads = []
    for function in (ops.chunk_kda, None):
        leaves = [x.clone().requires_grad_() for x in tensors]
        q, k, v, g, beta = leaves
        decay, strength = -torch.nn.functional.softplus(g), beta.sigmoid()
        if function is None:
            q64, k64 = reference.l2_normalize(q), reference.l2_normalize(k)
            out = _autograd_recurrence(q64[0], k64[0], v[0].double(), decay[0].double(), strength[0].double())
        else:
            out = function(q, k, v, decay, strength, use_qk_l2norm_in_kernel=True, backend="torch")[0][0]
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        grads.append(torch.autograd.grad((out * weight).sum(), leaves))
    for got, want in zip(*grads, strict=True):
        assert relative_error(got, want.double()) < 5e-6


def _autograd_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(q.shape[1], q.shape[2], v.shape[2], dtype=torch.float64)
    outputs = []
    for t in range(q.shape[0]):
        state = state * g[t].exp()[..., None]
        correction = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], correction)
        outputs.append(q.shape[2] ** -0.5 * torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs)


def test_temporaries_stay_small() -> None:
    """Peak memory of temporaries, by torch's own accounting, is within 3 times inputs and outputs."""
    inputs = activated([2048], -0.02, heads=8)
    sizes = sum(x.numel() * x.element_size() for x in (*inputs.operands(), inputs.v, inputs.states))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(inputs)
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak <= 3 * sizes


def test_blocks_cover_every_token_once() -> None:
    segments = Segments.from_lengths([5, 0, 40, 16, 33], first_token=[50, 0, 0, 60, 80])
    seen: list[int] = []
    for group in prefill.groups(segments, value_heads=32, device=CPU):
        for block in group.blocks(rows=3):
            seen += block.token[block.valid].tolist()
            assert sum(block.alive) == len(block.member) == len(block.token)
    assert sorted(seen) == [*range(40), *range(50, 55), *range(60, 76), *range(80, 113)]


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (0, 0), (1, 0), (2, 0), (1, 65), (2, 65), (2, 64)])
def test_intermediate_states_have_one_row_a_chunk(batch: int, length: int, chunk_size: int) -> None:
    x = [torch.zeros(batch, length, 2, 16) for _ in range(4)]
    out, final, *states = chunk_kda(
        *x, x[0][..., 0], output_final_state=True, return_intermediate_states=True, chunk_size=chunk_size,
        backend="torch",
    )  # fmt: skip
    assert out.shape == x[2].shape
    assert final is not None
    assert final.shape == (batch, 2, 16, 16)
    assert [s.shape for s in states] == [(batch, -(-length // chunk_size), 2, 16, 16)]
