"""The ground truth itself: against an independent loop, by hand, and by the properties that the mathematics has."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidkda import reference


def oracle(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, b: np.ndarray, state: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """One head, numpy, written from the matrix form: S = (I - b k k^T) Diag(exp g) S + b k v^T."""
    outputs = []
    for t in range(len(q)):
        erase = np.eye(len(k[t])) - b[t] * np.outer(k[t], k[t])
        state = erase @ np.diag(np.exp(g[t])) @ state + b[t] * np.outer(k[t], v[t])
        outputs.append(scale * state.T @ q[t])
    return np.array(outputs).reshape(len(q), v.shape[-1]), state


def draw(tokens: int, heads: int = 2, value_heads: int = 4, key_dim: int = 6, value_dim: int = 5, seed: int = 0):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    shape = {"q": (heads, key_dim), "k": (heads, key_dim), "v": (value_heads, value_dim), "g": (value_heads, key_dim)}
    x = {name: rng.standard_normal((1, tokens, *s)) for name, s in shape.items()}
    x["g"] = -np.abs(x["g"])
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    x["beta"] = rng.uniform(0, 1, (1, tokens, value_heads))
    return {name: torch.from_numpy(value) for name, value in x.items()}


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("lens", [[7], [3, 0, 4], [0, 7], [1] * 7])
def test_matches_the_matrix_form(lens: list[int], v_first: bool) -> None:
    """Packed sequences with initial states, grouped values and both layouts, against numpy head by head."""
    x = draw(7)
    states = torch.randn(len(lens), 4, 6, 5, dtype=torch.float64)
    ends = torch.tensor([0, *np.cumsum(lens)])
    given_states = states.transpose(-1, -2).contiguous() if v_first else states
    out, final = reference.kda(**x, scale=0.3, initial_state=given_states, cu_seqlens=ends, state_v_first=v_first)
    final = final.transpose(-1, -2) if v_first else final
    for n, head in np.ndindex(len(lens), 4):
        rows, key_head = slice(int(ends[n]), int(ends[n + 1])), head // 2
        parts = [
            x[name][0, rows, h].numpy() for name, h in (("q", key_head), ("k", key_head), ("v", head), ("g", head))
        ]
        want_out, want = oracle(*parts, x["beta"][0, rows, head].numpy(), states[n, head].numpy(), 0.3)
        np.testing.assert_allclose(out[0, rows, head], want_out, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(final[n, head], want, rtol=1e-12, atol=1e-12)


def test_batch_equals_packed() -> None:
    x = {name: value.reshape(2, 4, *value.shape[2:]) for name, value in draw(8).items()}
    packed = {name: value.reshape(1, 8, *value.shape[2:]) for name, value in x.items()}
    out, final = reference.kda(**x)
    out_packed, final_packed = reference.kda(**packed, cu_seqlens=torch.tensor([0, 4, 8]))
    assert torch.equal(out.reshape(out_packed.shape), out_packed)
    assert torch.equal(final, final_packed)


@given(cut=st.integers(0, 12), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_prompt_may_be_cut_anywhere(cut: int, seed: int) -> None:
    x = draw(12, seed=seed)
    out, final = reference.kda(**x)
    first = {name: value[:, :cut] for name, value in x.items()}
    rest = {name: value[:, cut:] for name, value in x.items()}
    out_first, state = reference.kda(**first)
    out_rest, final_rest = reference.kda(**rest, initial_state=state)
    assert torch.equal(torch.cat([out_first, out_rest], 1), out)
    assert torch.equal(final_rest, final)


def test_a_segment_is_an_affine_map_of_its_state() -> None:
    """S_out = M S_in + B, M from an identity state with v = 0, B from a zero state; maps of two segments compose."""
    x = draw(10, heads=1, value_heads=1, key_dim=6, value_dim=6)
    start = torch.randn(1, 1, 6, 6, dtype=torch.float64)

    def pair(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = {name: value[:, rows] for name, value in x.items()}
        _, offset = reference.kda(**part)
        identity = torch.eye(6, dtype=torch.float64)[None, None]
        _, matrix = reference.kda(**{**part, "v": torch.zeros_like(part["v"])}, initial_state=identity)
        return matrix, offset

    (m1, b1), (m2, b2) = pair(slice(0, 4)), pair(slice(4, 10))
    _, final = reference.kda(**x, initial_state=start)
    torch.testing.assert_close(m2 @ (m1 @ start + b1) + b2, final, rtol=1e-12, atol=1e-12)


def test_one_token_by_hand() -> None:
    """Decay first, the delta rule reads the decayed state, then the write, then the read of the written state."""
    one, two = [torch.tensor(x, dtype=torch.float64).reshape(1, 1, 1, 2) for x in ([1.0, 0.0], [3.0, 4.0])]
    g = torch.full((1, 1, 1, 2), math.log(0.5), dtype=torch.float64)
    state = torch.tensor([[8.0, 16.0], [2.0, 4.0]], dtype=torch.float64)[None, None]  # [K, V]
    beta = torch.full((1, 1, 1), 0.25, dtype=torch.float64)
    out, final = reference.kda(one, one, two, g, beta, scale=2.0, initial_state=state)
    # decayed rows [4, 8] and [1, 2]; row 0 moves a quarter of the way to v = [3, 4]
    assert final[0, 0].tolist() == [[3.75, 7.0], [1.0, 2.0]]
    assert out.flatten().tolist() == [7.5, 14.0]


@pytest.mark.parametrize("bound", [-5.0, -0.5])
def test_bounded_gate(bound: float) -> None:
    g = torch.tensor([0.0, 1e4, -1e4, 0.7]).reshape(1, 4).double()
    A_log, dt_bias = torch.tensor([math.log(2.0)]).double(), torch.tensor([0.0, 0, 0, 0.3]).double()
    decay = reference.gate_log_decay(g, A_log, dt_bias, bound)
    want = [bound / 2, bound, 0.0, bound / (1 + math.exp(-2.0))]
    torch.testing.assert_close(decay[0], torch.tensor(want, dtype=torch.float64))
    absent = reference.gate_log_decay(g, lower_bound=bound)
    torch.testing.assert_close(absent[0, 3], torch.tensor(bound / (1 + math.exp(-0.7)), dtype=torch.float64))


def test_unbounded_gate() -> None:
    g = torch.tensor([[0.0, 10.0], [-10.0, 100.0]]).double()
    decay = reference.gate_log_decay(g, torch.tensor([[[[0.0], [math.log(16.0)]]]]).double())
    want = [[-math.log(2.0), -10.0 - math.log1p(math.exp(-10.0))], [-16 * math.log1p(math.exp(-10.0)), -1600.0]]
    torch.testing.assert_close(decay, torch.tensor(want, dtype=torch.float64))


def test_raw_inputs_are_activated_once() -> None:
    """The options say nothing that activating the inputs beforehand would not say."""
    x = draw(6)
    raw = {**x, "g": torch.randn(1, 6, 4, 6).double(), "beta": torch.randn(1, 6, 4).double(), "k": 3 * x["k"]}
    gate = {"A_log": torch.rand(4).double(), "dt_bias": torch.randn(24).double(), "lower_bound": -4.0}
    got = reference.kda(**raw, use_qk_l2norm=True, use_gate=True, use_beta_sigmoid=True, allow_neg_eigval=True, **gate)
    activated = {
        "q": reference.l2_normalize(raw["q"]),
        "k": reference.l2_normalize(raw["k"]),
        "v": raw["v"],
        "g": reference.gate_log_decay(raw["g"], gate["A_log"], gate["dt_bias"], -4.0),
        "beta": 2 * torch.sigmoid(raw["beta"]),
    }
    want = reference.kda(**activated)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    norm = raw["k"][0, 0, 0].norm()
    torch.testing.assert_close(activated["k"][0, 0, 0], raw["k"][0, 0, 0] / (norm**2 + 1e-6).sqrt())


def test_initial_state_is_not_modified() -> None:
    states = torch.randn(1, 4, 6, 5, dtype=torch.float64)
    before = states.clone()
    reference.kda(**draw(3), initial_state=states)
    assert torch.equal(states, before)


def test_convolution_by_hand() -> None:
    x = torch.tensor([[7.0], [8.0]])
    weight, history = torch.tensor([[1.0, 10.0, 100.0, 1000.0]]), torch.tensor([[1.0], [2.0], [3.0]])
    y, window = reference.causal_conv(x, weight, torch.tensor([0.5]), history, silu=False)
    assert y.flatten().tolist() == [7321.5, 8732.5]
    assert window.flatten().tolist() == [3.0, 7.0, 8.0]
    y, window = reference.causal_conv(x[:1], weight, silu=True)
    torch.testing.assert_close(y, torch.nn.functional.silu(torch.tensor([[7000.0]], dtype=torch.float64)))
    assert window.flatten().tolist() == [0.0, 0.0, 7.0]
    _, window = reference.causal_conv(x[:0], weight, None, history)
    assert window.flatten().tolist() == [1.0, 2.0, 3.0]


def test_convolution_is_torch_conv1d() -> None:
    x, weight = torch.randn(9, 5).double(), torch.randn(5, 4).double()
    y, _ = reference.causal_conv(x, weight, silu=False)
    want = torch.nn.functional.conv1d(torch.nn.functional.pad(x.t()[None], (3, 0)), weight[:, None], groups=5)
    torch.testing.assert_close(y, want[0].t())


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_gated_norm_by_hand(activation: str) -> None:
    x = torch.tensor([[[3.0, 4.0], [30.0, 40.0]]])
    y = reference.gated_rms_norm(x, torch.zeros(1, 2, 2), torch.tensor([1.0, 2.0]), 0.0, activation)
    rms = math.sqrt(12.5)
    want = [3 / rms / 2, 8 / rms / 2] if activation == "sigmoid" else [0.0, 0.0]
    for head in range(2):  # each head by its own size
        torch.testing.assert_close(y[0, head], torch.tensor(want, dtype=torch.float64))
