"""Operands from model to file to benchmark inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rapidkda import ops
from rapidkda.evaluation.capture import capture
from rapidkda.testing import Shape, make_inputs
from rapidkda.testing import captured as files
from rapidkda.testing.accuracy import kda_check
from rapidkda.testing.captured import Captured

TEXT = [1 + n * 7 % 250 for n in range(80)]


@pytest.fixture(scope="module")
def whole(small: Any) -> dict[int, dict[str, torch.Tensor]]:
    layers, bound = capture(small, TEXT)
    assert bound == -5.0
    return layers


@pytest.fixture(scope="module")
def file(small: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers, bound = capture(small, TEXT, skip=30, layers=(0, 2))
    path = tmp_path_factory.mktemp("captured") / "two.safetensors"
    files.save(path, layers, bound, {"text": "made up", "skip": 30})
    return path


def test_every_kda_layer_in_order(small: Any, whole: dict[int, dict[str, torch.Tensor]]) -> None:
    assert list(whole) == [0, 1, 2]
    for layer, tensors in whole.items():
        assert {name: tuple(x.shape) for name, x in tensors.items()} == {
            **dict.fromkeys(("q", "k", "v", "g"), (80, 2, 16)),
            "beta": (80, 2),
            "A_log": (2,),
            "dt_bias": (2, 16),
            "state": (2, 16, 16),
        }
        gate = small.model.language_model.layers[layer].self_attn.forget_gate
        assert torch.equal(tensors["A_log"], gate.A_log.flatten())
        assert torch.equal(tensors["dt_bias"].flatten(), gate.dt_bias.flatten())


def test_skipped_tokens_are_in_the_state(small: Any, whole: dict[int, dict[str, torch.Tensor]]) -> None:
    """Running the kept tokens from the kept state is running all of them."""
    tail, _ = capture(small, TEXT, skip=30)
    for layer, tensors in tail.items():
        full = whole[layer]
        for name in ("q", "k", "v", "g", "beta"):
            assert torch.equal(tensors[name], full[name][30:])
        options = {"A_log": full["A_log"], "dt_bias": full["dt_bias"], "lower_bound": -5.0, "backend": "torch"}
        options |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
        operands = [[part[x].float()[None] for x in ("q", "k", "v", "g", "beta")] for part in (full, tensors)]
        want = ops.chunk_kda(*operands[0], **options)[0][:, 30:]
        got = ops.chunk_kda(*operands[1], **options, initial_state=tensors["state"][None], state_v_first=True)[0]
        torch.testing.assert_close(got, want, atol=2e-2 * float(want.abs().max()), rtol=0)  # operands were rounded


def test_a_regime_tiles_tokens_and_heads(file: Path) -> None:
    found = files.load(file)
    assert found.beta.shape == (50, 4)
    assert found.origin["text"] == "made up"
    shape = Shape("long", (120, 7), 6, key_dim=16, value_dim=16)
    inputs = make_inputs(shape, found.regime(), seed=3)
    assert inputs.lower_bound == -5.0
    heads = [0, 1, 2, 3, 0, 1]
    for first, length in inputs.spans:
        start = next(n for n in range(50) if torch.equal(inputs.q[first], found.q[n, heads].float()))
        rows = [(start + n) % 50 for n in range(length)]
        for name in ("q", "k", "v", "g", "beta"):
            got = getattr(inputs, name)[first : first + length]
            assert torch.equal(got, getattr(found, name)[rows][:, heads].float())
    assert inputs.A_log is not None
    assert torch.equal(inputs.A_log, found.A_log[heads])
    assert torch.equal(inputs.states, found.states[heads].expand(2, -1, -1, -1))


def test_grouped_values_keep_their_key_heads(file: Path) -> None:
    found = files.load(file)
    inputs = make_inputs(Shape("grouped", (9,), 2, 4, key_dim=16, value_dim=16), found.regime(), seed=3)
    start = next(n for n in range(50) if torch.equal(inputs.v[0], found.v[n].float()))
    assert torch.equal(inputs.q[0], found.q[start, [0, 2]].float())


def test_every_check_of_verify_takes_them(file: Path) -> None:
    regime = files.load(file).regime()
    shape = Shape("two", (70, 3), 4, key_dim=16, value_dim=16)
    verifications = (kda_check("verify"), kda_check("verify", "slots"), kda_check("verify", deferred=True))
    for check in (kda_check("prefill"), kda_check("decode"), *verifications):
        found = check(shape, regime, torch.float32, torch.device("cpu"), "torch", 0)
        assert found.regime == "captured"
        assert found.passed, found


def test_other_head_dims_are_refused(file: Path) -> None:
    regime = files.load(file).regime()
    with pytest.raises(ValueError, match=r"captured head dims \(16, 16\), got wide with \(128, 128\)"):
        make_inputs(Shape("wide", (5,), 2), regime)


def test_what_is_no_capture(small: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="must be a file of rapidkda capture"):
        files.load(path)
    save_file({"0.q": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="got None"):
        files.load(path)
    files.save(path, {0: {"q": torch.zeros(1, 1, 1)}}, None, {})
    with pytest.raises(ValueError, match="must hold q, k, v, g, beta and state"):
        files.load(path)
    with pytest.raises(ValueError, match="layers must be KDA layers, 0, 1, 2, got 3"):
        capture(small, TEXT, layers=(3,))
    with pytest.raises(ValueError, match="skip must be at least 0 and leave some of the 80 tokens, got 80"):
        capture(small, TEXT, skip=80)


def test_a_gate_without_parameters(tmp_path: Path) -> None:
    one = {name: torch.ones(4, 2, 8) for name in ("q", "k", "v", "g")}
    files.save(tmp_path / "y", {5: {**one, "beta": torch.ones(4, 2), "state": torch.zeros(2, 8, 8)}}, None, {})
    found: Captured = files.load(tmp_path / "y")
    assert found.lower_bound is None
    assert not found.A_log.any()
    assert found.dt_bias.shape == (2, 8)
