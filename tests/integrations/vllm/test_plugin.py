"""The switch, the refusals, and what stays vLLM's own, against stand-ins that follow the supported versions."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from rapidkda import BackendUnavailable, ConfigConflict
from rapidkda.integrations import post_import
from rapidkda.integrations.contract import Sources, differences
from rapidkda.integrations.vllm import layers, plugin, wrap
from rapidkda.integrations.vllm import metadata as steps
from rapidkda.integrations.vllm.seams import GDN, GLM, K3, K3_ROCM, KIMI, SEAMS

from .conftest import FOLDERS, without_texts
from .driver import Driver, Part, Request

Standin = Callable[..., Path]
ASKED = {"kda_prefill_backend": "rapidkda"}


@pytest.fixture(autouse=True)
def on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPIDKDA_PREFILL_BACKEND", "torch")
    monkeypatch.setenv("RAPIDKDA_DECODE_BACKEND", "torch")


@pytest.mark.parametrize("version", sorted(FOLDERS))
def test_standins_follow_the_names_and_signatures_of_the_version(standin: Standin, version: str) -> None:
    root = standin(version)
    assert differences(without_texts(SEAMS[version]).facts, Sources(root)) == []


@pytest.mark.parametrize("version", sorted(FOLDERS))
def test_off_by_default(standin: Standin, version: str) -> None:
    standin(version)
    plugin.register()
    for index in range(len(SEAMS[version].layers)):
        driver = Driver(version, index, config={})
        driver.step([Part(Request([1]), 20)])
        assert driver.layer.original_calls == ["step"]
        assert not hasattr(driver.layer, wrap.PLAN)
        if hasattr(driver.layer, "get_kv_cache_spec"):
            assert driver.layer.get_kv_cache_spec(driver.vllm_config).num_prefill_checkpoint_blocks == 0


@pytest.mark.parametrize("version", sorted(FOLDERS))
def test_both_switches_turn_it_on_and_say_so_once_a_class(
    standin: Standin, version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    standin(version)
    plugin.register()
    plugin.register()  # vLLM may call it again in the same process
    caplog.set_level(logging.INFO, logger="vllm.plugins.rapidkda")
    for index, seam in enumerate(SEAMS[version].layers):
        caplog.clear()
        monkeypatch.delenv("RAPIDKDA_VLLM", raising=False)
        configured = Driver(version, index, config=dict(ASKED))
        monkeypatch.setenv("RAPIDKDA_VLLM", "prefill")
        switched = Driver(version, index, config={})
        for driver in (configured, switched):
            driver.step([Part(Request([1]), 20)])
            assert driver.layer.original_calls == []
        assert configured.vllm_config.additional_config == ASKED  # as the user wrote it
        lines = [record.getMessage() for record in caplog.records if seam.cls in record.getMessage()]
        assert len(lines) == 1
        assert "torch" in lines[0]
        assert seam.model in lines[0]


@pytest.mark.parametrize("name", ["auto", "triton", "flashkda"])
@pytest.mark.parametrize("module", [K3, GLM])
def test_other_backend_names_pass_unchanged(standin: Standin, module: str, name: str) -> None:
    standin("0.33.0")
    plugin.register()
    index = [layer.module for layer in SEAMS["0.33.0"].layers].index(module)
    driver = Driver("0.33.0", index, config={"kda_prefill_backend": name})
    assert driver.layer.kda_prefill_backend == name
    driver.step([Part(Request([1]), 20)])
    assert driver.layer.original_calls == ["step"]


def test_an_unknown_name_meets_vllms_own_refusal(standin: Standin) -> None:
    standin("0.33.0")
    plugin.register()
    with pytest.raises(ValueError, match="Unsupported KDA prefill backend: rapid"):
        Driver("0.33.0", 2, config={"kda_prefill_backend": "rapid"})


def test_two_sources_that_disagree_are_an_error_that_names_both(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("0.33.0")
    plugin.register()
    monkeypatch.setenv("RAPIDKDA_VLLM", "prefill")
    from vllm.config import VllmConfig

    with pytest.raises(ConfigConflict, match=r"RAPIDKDA_VLLM asks for 'rapidkda'.*additional_config.*'flashkda'"):
        VllmConfig(additional_config={"kda_prefill_backend": "flashkda"})
    VllmConfig(additional_config={"kda_prefill_backend": "auto"})
    VllmConfig(additional_config=dict(ASKED))


def test_a_bad_switch_is_an_error(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    standin("0.33.0")
    monkeypatch.setenv("RAPIDKDA_VLLM", "decode")
    with pytest.raises(ValueError, match="RAPIDKDA_VLLM must be prefill, off or unset; got 'decode'"):
        plugin.register()


def test_unsupported_version_is_refused_at_start_up(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    standin("0.33.0", claimed="0.40.1")
    from vllm.config import VllmConfig

    plugin.register()  # not asked for: vLLM runs as if rapidkda were not there
    VllmConfig(additional_config={})
    VllmConfig(additional_config={"kda_prefill_backend": "flashkda"})
    with pytest.raises(plugin.UnsupportedVllm, match=r"additional_config.*supports vLLM .*; found vLLM 0\.40\.1"):
        VllmConfig(additional_config=dict(ASKED))
    monkeypatch.setenv("RAPIDKDA_VLLM", "prefill")
    with pytest.raises(plugin.UnsupportedVllm, match=r"found vLLM 0\.40\.1"):
        plugin.register()


def test_differing_seam_is_refused_at_start_up(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    root = standin("0.33.0")
    path = root.joinpath(*GLM.split(".")).with_suffix(".py")
    path.write_text(path.read_text().replace("kda_lower_bound", "lower_bound"))
    monkeypatch.setenv("RAPIDKDA_VLLM", "prefill")
    with pytest.raises(
        plugin.UnsupportedVllm, match=r"Glm5NextLinearAttention: expected attributes kda_lower_bound, found"
    ):
        plugin.register()
    monkeypatch.delenv("RAPIDKDA_VLLM")
    plugin.register()
    from vllm.config import VllmConfig

    with pytest.raises(plugin.UnsupportedVllm, match="kda_lower_bound"):
        VllmConfig(additional_config=dict(ASKED))


def test_layers_that_cannot_be_served_are_refused_when_built(standin: Standin) -> None:
    standin("0.33.0")
    plugin.register()
    from vllm.config import VllmConfig

    rocm = importlib.import_module(K3_ROCM)
    with pytest.raises(RuntimeError, match=r"additional_config.*asks for 'rapidkda'.*ROCm"):
        rocm.KimiK3DeltaAttention(None, VllmConfig(additional_config=dict(ASKED)))


def test_kimi_k3_of_versions_before_it_is_served_is_refused_when_built(standin: Standin) -> None:
    standin("0.29.0")
    plugin.register()
    from vllm.config import VllmConfig

    layer = importlib.import_module(K3).KimiK3DeltaAttention
    with pytest.raises(RuntimeError, match=r"additional_config.*rapidkda serves Kimi-K3 from vLLM 0\.30\.0 on"):
        layer(None, VllmConfig(additional_config=dict(ASKED)))


def test_configurations_that_cannot_be_served_are_refused_when_built(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin("0.33.0")
    plugin.register()
    driver = Driver("0.33.0", 1, lower_bound=-5.0)
    driver.layer.use_recoverssm = True
    with pytest.raises(RuntimeError, match="--use-replayssm"):
        layers.plan(driver.layer_seam, driver.layer, driver.vllm_config)
    driver.layer.use_recoverssm = False
    driver.layer.conv1d.bias = torch.zeros(1)
    with pytest.raises(RuntimeError, match="without bias"):
        layers.plan(driver.layer_seam, driver.layer, driver.vllm_config)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("RAPIDKDA_PREFILL_BACKEND", "triton")
    with pytest.raises(BackendUnavailable, match="triton"):
        Driver("0.33.0", 1, lower_bound=-5.0)


def test_speculation_with_the_layer_of_0_25_is_refused_when_built(standin: Standin) -> None:
    standin("0.25.1")
    plugin.register()
    with pytest.raises(RuntimeError, match="does not serve speculative decoding"):
        Driver("0.25.1", 0, num_spec=2)


def test_workspace_comes_from_vllm_and_is_claimed_without_metadata(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sizes its memory in a run without metadata, then locks the workspace."""
    standin("0.33.0")
    plugin.register()
    torch_backend = layers.resolve_kda_prefill_backend("torch").backend
    monkeypatch.setattr(type(torch_backend), "workspace_bytes", lambda self, op, sizes: 64 * sizes.tokens)
    driver = Driver("0.33.0", 2, lower_bound=-5.0)
    from vllm import forward_context
    from vllm.v1.worker.workspace import manager

    claim = (((64 * driver.vllm_config.scheduler_config.max_num_batched_tokens,), torch.uint8),)
    forward_context.current.attn_metadata = None
    driver.layer._forward(qkv_proj_states=None, g1=None, beta=None, core_attn_out=None)
    assert driver.layer.original_calls == ["without metadata"]
    assert manager.requests == [claim]
    driver.step([Part(Request([1]), 20)])
    assert manager.requests == [claim, claim]


def test_layers_stay_break_points_of_vllms_graphs(standin: Standin) -> None:
    standin("0.33.0")
    plugin.register()
    for index, seam in enumerate(SEAMS["0.33.0"].layers):
        cls = type(Driver("0.33.0", index, lower_bound=-5.0).layer)
        assert cls.__name__ == seam.cls
        assert hasattr(cls._forward, wrap.WRAPPED)
        assert cls._forward.eager_break


def test_without_a_wish_only_constructors_are_wrapped(standin: Standin) -> None:
    """Not even a vLLM that differs from the seam is checked, or touched any further."""
    root = standin("0.33.0")
    path = root.joinpath(*GLM.split(".")).with_suffix(".py")
    path.write_text(path.read_text().replace("def _forward", "def renamed"))
    plugin.register()
    driver = Driver("0.33.0", 2, config={})
    assert hasattr(type(driver.layer).__init__, wrap.WRAPPED)
    assert not hasattr(type(driver.builder).build, wrap.WRAPPED)
    assert not hasattr(type(driver.layer).get_kv_cache_spec, wrap.WRAPPED)
    asking = driver.vllm_config
    asking.additional_config = dict(ASKED)
    with pytest.raises(plugin.UnsupportedVllm, match=r"Glm5NextLinearAttention\._forward: expected a function"):
        type(driver.layer)(None, asking)


def test_metadata_of_another_group_keeps_the_hosts_lengths(standin: Standin) -> None:
    standin("0.33.0")
    plugin.register()
    driver = Driver("0.33.0", 0)
    made = driver.metadata([Part(Request([1]), 20), Part(Request([2]), 3)])
    other = driver.builder.update_block_table(made, torch.tensor([[7], [8]]), None)
    assert other is not made
    assert steps.tables(other).prefill.host is not None
    assert steps.tables(other) is not steps.tables(made)


def test_nothing_is_imported_before_vllm_does(standin: Standin) -> None:
    standin("0.33.0")
    plugin.register()
    assert not {KIMI, GLM, K3, GDN} & set(sys.modules)
    assert importlib.import_module(GLM).__spec__.name == GLM


def test_modules_imported_before_the_plugin_are_prepared_too(standin: Standin) -> None:
    standin("0.33.0")
    importlib.import_module(GLM)
    plugin.register()
    driver = Driver("0.33.0", 2, lower_bound=-5.0)
    driver.step([Part(Request([1]), 20)])
    assert driver.layer.original_calls == []


def test_a_module_that_fails_to_import_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "module_of_this_test.py"
    path.write_text("raise ImportError('not yet')")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[str] = []
    post_import.after_import("module_of_this_test", lambda module: seen.append(module.__name__))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("module_of_this_test")
    path.write_text("value = 1\n")
    importlib.invalidate_caches()
    assert importlib.import_module("module_of_this_test").value == 1
    assert seen == ["module_of_this_test"]
    sys.modules.pop("module_of_this_test")


def test_entry_point_names_the_plugin() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    section = text.split('[project.entry-points."vllm.general_plugins"]')[1].split("[")[0]
    name, _, value = section.strip().partition(" = ")
    entry = EntryPoint(name, value.strip('"'), "vllm.general_plugins")
    assert entry.load() is plugin.register


def test_importing_rapidkda_imports_no_vllm() -> None:
    code = (
        "import sys, rapidkda, rapidkda.integrations.vllm; print([m for m in sys.modules if m.split('.')[0] == 'vllm'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_report_of_the_installed_version(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    from rapidkda.integrations.vllm import __main__ as command

    root = standin("0.33.0")
    monkeypatch.setattr(command, "version", lambda name: "0.33.0")
    status, text = command.report()
    assert status == 0
    assert all(name in text for name in (str(root), "GLM-5.3-Flash", "Kimi-Linear", "Kimi-K3", "off unless configured"))
    monkeypatch.setattr(command, "version", lambda name: "0.12.0")
    status, text = command.report()
    assert status == 1
    assert "found vLLM 0.12.0" in text
    assert "vllm" not in sys.modules
