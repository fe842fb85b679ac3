"""What `accelerate` changes and reports, how `restore` undoes it, and what is refused."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from rapidkda import BackendUnavailable, ConfigConflict
from rapidkda.integrations.transformers import accelerate, restore

from .support import BAR, BUILDERS, cache_error, error, in_chunks, kda_layer, run, tokens

pytest.importorskip("transformers", minversion="5.17")


def test_restore_is_exact(model: Any) -> None:
    ids = tokens(2, 33)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    want, want_cache = run(model, ids)
    report = accelerate(model)
    assert len(report.layers) == 3
    assert not torch.equal(run(model, ids)[0], want)
    assert restore(model) == 3
    got, cache = run(model, ids)
    assert torch.equal(got, want)
    assert cache_error(cache, want_cache) == 0.0
    assert {name: vars(module).keys() for name, module in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }
    assert restore(model) == 0


def test_accelerate_is_idempotent(model: Any) -> None:
    ids = tokens(1, 33)
    first = accelerate(model)
    want, _ = run(model, ids)
    assert accelerate(model) == first
    assert torch.equal(run(model, ids)[0], want)
    assert restore(model) == 3
    assert restore(model) == 0


def test_a_replaced_forward_comes_back(model: Any) -> None:
    layer = kda_layer(model)
    own = MethodType(type(layer).forward, layer)
    layer.forward = own
    try:
        accelerate(model)
        assert vars(layer)["forward"] is not own
        restore(model)
        assert vars(layer)["forward"] is own
    finally:
        del layer.forward


def test_only_this_model_changes(model: Any) -> None:
    other = copy.deepcopy(model)
    forward = type(kda_layer(model)).forward
    accelerate(model)
    assert type(kda_layer(model)).forward is forward
    assert "forward" not in vars(kda_layer(other))
    assert "forward" in vars(kda_layer(model))
    twin = copy.deepcopy(model)
    assert vars(kda_layer(twin))["forward"].__self__.module is kda_layer(twin)
    assert restore(twin) == 3
    assert "forward" in vars(kda_layer(model))


def test_accelerated_model_saves_as_before(model: Any, tmp_path: Any) -> None:
    keys = set(model.state_dict())
    accelerate(model)
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert restore(loaded) == 0
    accelerate(loaded)
    ids = tokens(1, 20)
    assert error(run(loaded, ids)[0], run(model, ids)[0]) < 1e-6


def test_auto_says_why_it_passed_others_over(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAPIDKDA_PREFILL_BACKEND")
    monkeypatch.delenv("RAPIDKDA_DECODE_BACKEND")
    report = accelerate(model)
    for choice in (report.prefill, report.decode):
        assert (choice.name, choice.source) == ("torch", "auto")
        assert set(choice.passed_over) == {"cuda", "triton", "flashkda"}
    ids = tokens(1, 20)
    got, _ = in_chunks(model, ids, [12, 7, 1])
    restore(model)
    assert error(got, run(model, ids)[0]) < BAR


def test_report_says_what_and_why(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAPIDKDA_DECODE_BACKEND")
    report = accelerate(model, backend="torch", decode_backend="torch")
    assert report.family in ("glm5_next", "kimi_linear")
    assert report.layers[0].endswith("layers.0.self_attn")
    assert (report.prefill.name, report.prefill.source) == ("torch", "argument backend")
    assert report.family in str(report)
    assert "3 KDA layers" in str(report)
    assert "torch" in str(report)


def test_wrong_calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        accelerate("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got NoneType"):
        restore(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model must have KDA layers.*got Linear"):
        accelerate(nn.Linear(2, 2))
    with pytest.raises(ConfigConflict, match="RAPIDKDA_PREFILL_BACKEND"):
        accelerate(model, backend="cuda")
    monkeypatch.delenv("RAPIDKDA_PREFILL_BACKEND")
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*torch.*got 'fastest'"):
        accelerate(model, backend="fastest")
    with pytest.raises(TypeError, match="backend must be a backend name"):
        accelerate(model, backend=3)  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailable, match="cuda"):
        accelerate(model, backend="cuda")
    assert restore(model) == 0, "an error must change nothing"


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "6.0.0", "7.1", "unknown"])
def test_unsupported_transformers(model: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(RuntimeError, match=f"transformers >= 5.17 and < 6.0, found {version}"):
        accelerate(model)
    assert restore(model) == 0


def test_missing_transformers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeError, match=r"transformers >= 5.17 and < 6.0 must be installed \(pip install"):
        accelerate(model)


def test_unknown_layer_is_refused(family: str) -> None:
    model = BUILDERS[family]()
    layer = kda_layer(model)
    layer.forget_gate.decay = layer.forget_gate.A_log
    del layer.forget_gate.A_log
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn of transformers .* lacks forget_gate\.A_log"):
        accelerate(model)
    model = BUILDERS[family]()
    kda_layer(model).activation = "gelu"
    with pytest.raises(ValueError, match="activation 'silu', got 'gelu'"):
        accelerate(model)
    assert restore(model) == 0
    model = BUILDERS["glm5_next"](lower_bound=-6.0)
    with pytest.raises(ValueError, match=r"lower bound in \[-5, 0\) or none, got -6.0"):
        accelerate(model)


def test_importing_does_not_import_transformers() -> None:
    code = (
        "import sys, rapidkda, rapidkda.integrations.transformers, rapidkda.testing.models\n"
        "sys.exit('transformers' in sys.modules or 'torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_of_the_integration_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[3] / "docs" / "integrations" / "transformers.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    assert names["text"].shape == (1, 220)
    assert "3 KDA layers of kimi_linear" in capsys.readouterr().out
