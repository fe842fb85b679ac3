"""`rapidkda doctor` on this machine, and on simulated ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rapidkda import dispatch
from rapidkda.cli import doctor
from rapidkda.cli.console import VARIABLES
from rapidkda.device import CPU, Device
from rapidkda.problem import OPS

from .conftest import Cli

H200 = Device("nvidia", "NVIDIA H200", (9, 0))


def test_report_covers_every_operator_and_backend(cli: Cli) -> None:
    done = cli("doctor", "--json")
    assert done.code == 0
    report = json.loads(done.out)
    for decisions in report["backends"].values():
        assert {label.split(",")[0] for label in decisions} == set(OPS)
        for decision in decisions.values():
            assert set(decision["unmet"]) == set(dispatch.REGISTRY)
            assert decision["auto"] is not None
            assert decision["unmet"][decision["auto"]] == []
            earlier = list(dispatch.REGISTRY)[: list(dispatch.REGISTRY).index(decision["auto"])]
            assert all(decision["unmet"][name] for name in earlier), "a backend was passed over without a reason"


def test_text_gives_every_reason_once(cli: Cli) -> None:
    report = json.loads(cli("doctor", "--json").out)
    done = cli("doctor")
    assert done.code == 0
    lines = done.out.splitlines()
    assert any(line.split()[:2] == ["operator", "auto"] for line in lines)
    for decisions in report["backends"].values():
        for op, decision in decisions.items():
            for name, reasons in decision["unmet"].items():
                for reason in reasons:
                    found = [line for line in lines if line.startswith(f"  {name}: {reason}")]
                    assert len(found) == 1 or len(report["backends"]) > 1, (op, name, reason)


def test_variables_are_shown_and_bad_values_explained(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPIDKDA_CHECK", "maybe")
    monkeypatch.setenv("RAPIDKDA_PREFILL_BACKEND", "cutlass")
    monkeypatch.setenv("RAPIDKDA_DECODE_BACKEND", "torch")
    monkeypatch.setenv("RAPIDKDA_CHEK", "1")
    seen = json.loads(cli("doctor", "--json").out)["environment"]
    assert "must be one of 1, 0" in seen["RAPIDKDA_CHECK"]
    assert "must be one of auto" in seen["RAPIDKDA_PREFILL_BACKEND"]
    assert seen["RAPIDKDA_DECODE_BACKEND"] == "torch"
    assert "reads no such variable" in seen["RAPIDKDA_CHEK"]


def test_every_variable_that_is_read_is_known_and_documented() -> None:
    root = Path(__file__).parents[2]
    sources = "".join(path.read_text() for path in (root / "src").rglob("*.py"))
    read = set(re.findall(r'"(RAPIDKDA_[A-Z_]*[A-Z])"', sources))
    table = (root / "docs" / "reliability.md").read_text().split("## Environment variables")[1]
    assert read == set(VARIABLES) == set(re.findall(r"`(RAPIDKDA_[A-Z_]+)`", table))


def test_advice_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    monkeypatch.setattr(doctor, "_driver_lists_gpu", lambda: True)
    on_cpu = "\n".join(doctor._advice({"cpu": CPU}))
    assert "CUDA build of torch" in on_cpu
    assert "rapidkda[cuda]" not in on_cpu
    on_hopper = "\n".join(doctor._advice({"cuda:0": H200, "cpu": CPU}))
    assert "rapidkda[cuda]" in on_hopper
    assert "CUDA build of torch" not in on_hopper
    monkeypatch.setattr(doctor, "version_of", lambda name: "1.0")
    assert doctor._advice({"cuda:0": H200, "cpu": CPU}) == []
