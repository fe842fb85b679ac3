"""The layer benchmark: every implementation is right on the step that is timed, and a wrong one is not reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapidkda import ops
from rapidkda.bench import layer, layer_inputs
from rapidkda.bench.timing import Settings

STEPS = (layer_inputs._pure(2, 40, 2, 16), layer_inputs._mixed(2, 33, 3, 2, 2, 2, 16))


@pytest.mark.parametrize("regime", ["slow", "unbounded"])
def test_rows_of_a_pure_and_a_mixed_step(regime: str) -> None:
    rows = layer.run_layer_bench("torch", steps=STEPS, regimes=(regime,), settings=Settings(rounds=1))
    assert [(row.shape, row.impl) for row in rows] == [
        ("pure_2x40_h2", "torch"),
        ("pure_2x40_h2", "torch-reference-sequence"),
        ("mixed_2x33+3x3+2_h2", "torch"),
        ("mixed_2x33+3x3+2_h2", "torch-slots"),
        ("mixed_2x33+3x3+2_h2", "torch-reference-sequence"),
    ]
    for row in rows:
        assert row.bench == "layer"
        assert 0 < row.us_min <= row.us <= row.us_max
        assert row.err_out is not None
        assert row.err_out <= layer.OUT_BARS[torch.float32]


def test_the_fastest_backends_against_another_kernel() -> None:
    rows = layer.run_layer_bench("auto", reference="torch", steps=STEPS[:1], settings=Settings(rounds=1))
    ours = rows[0].impl
    assert ours in ("cuda", "triton", "torch")
    assert [row.impl for row in rows] == [ours, "torch-reference-sequence"]


@pytest.mark.parametrize("operator", ["causal_conv", "prefill", "verify", "gated_rms_norm"])
def test_nothing_is_timed_on_a_wrong_result(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(ops, operator)

    def wrong(*arguments: Any, **keywords: Any) -> torch.Tensor:
        result: torch.Tensor = right(*arguments, **keywords)
        return result.mul_(1.001)

    monkeypatch.setattr(ops, operator, wrong)
    with pytest.raises(RuntimeError, match="above 1e-05; nothing timed"):
        layer.run_layer_bench("torch", steps=STEPS[1:])
