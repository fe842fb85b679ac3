"""Measurements on a CPU: every field is filled, results are checked, and a wrong result is not reported as a time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import rapidkda
from rapidkda import ops
from rapidkda.bench import cpu, steps
from rapidkda.bench.peers import Bound
from rapidkda.bench.steps import SUFFIXES, Form
from rapidkda.bench.timing import Settings
from rapidkda.dispatch import resolve
from rapidkda.problem import Op
from rapidkda.testing import Inputs, Shape, decode_shape, regime

CPU = torch.device("cpu")
FEW = Settings(rounds=2, replays=1)


def plan(op: Op, shape: Shape, *, form: Form = "replay", regimes: tuple[str, ...] = ("slow",)) -> steps.Plan:
    return steps.Plan(op, (shape,), regimes, ("torch",), (), CPU, settings=FEW, forms=(form,))


def test_cpu_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(cpu, "PREFILL", Shape("short", (130,), 2))
    settings = cpu.Settings(rounds=3, calls=1)
    rows = cpu.rows("cpu_prefill", "slow", settings) + cpu.rows("cpu_decode", "fast", settings)
    impls = [cpu.OURS, cpu.CHUNK, cpu.RECURRENT, cpu.OURS, cpu.RECURRENT]
    assert [row.impl for row in rows] == impls
    for row in rows:
        assert 0 < row.us_min <= row.us <= row.us_max
        assert row.err_out is not None
        assert row.err_state is not None
        assert row.err_out < 1e-4, "the peer does not compute the same function"
        assert row.err_state < 1e-4


def test_cpu_rows_refuse_to_time_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    right = ops.decode
    monkeypatch.setattr(ops, "decode", lambda *args, **options: right(*args, **options).mul_(1.01))
    with pytest.raises(RuntimeError, match="above the bars"):
        cpu.rows("cpu_decode", "slow", cpu.Settings(rounds=1))


@pytest.mark.parametrize(
    ("op", "shape", "form"),
    [
        ("prefill", Shape("ragged", (70, 3, 0, 33), 2), "replay"),
        ("decode", decode_shape(5, 2), "replay"),
        ("verify", decode_shape(4, 2, 3), "replay"),
        ("verify", decode_shape(7, 2, 1), "deferred"),
        ("verify", decode_shape(4, 2, 3), "slots"),
    ],
)
def test_steps_are_right_in_both_gates(op: Op, shape: Shape, form: Form) -> None:
    measured = steps.measure(plan(op, shape, form=form, regimes=("slow", "unbounded")), lambda line: None)
    assert measured.missed == []
    assert [row.regime for row in measured.rows] == ["slow", "unbounded"]
    for row in measured.rows:
        assert (row.bench, row.shape, row.impl) == (op, shape.name, f"torch{SUFFIXES[form]}")
        assert row.us > 0
        assert row.err_out is not None
        assert 1e-5 < row.err_out < 5e-3, "bfloat16 outputs err by their rounding"
        assert row.err_state is not None
        assert math.isfinite(row.err_state)


@pytest.mark.parametrize("number", range(4))
def test_calls_of_deferred_states_store_a_share_of_them(number: int) -> None:
    """Of 8 requests of 2 tokens and 8 records, 2 store their states in any call, whatever the input set."""
    settings = plan("verify", decode_shape(8, 2, 1))
    inputs = steps._inputs(settings, settings.shapes[0], regime("slow"), 0)
    choice = resolve(steps._request(settings, inputs, "deferred"), "torch", "test")
    pools: list[Tensor] = []

    def verify(*operands: Tensor, **options: Any) -> Tensor:
        pools.append(options["state"])
        return rapidkda.verify(*operands, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "verify", verify)
        bound = steps._defer(settings, inputs, choice, number)
        changed = []
        for _ in range(5):
            before = pools[-1].clone()
            bound.call()
            changed.append((pools[-1] != before).flatten(1).any(1).nonzero().flatten().tolist())
    assert changed == [[(n - number) % 4, (n - number) % 4 + 4] for n in range(5)]


def test_records_of_deferred_states_are_those_of_serving_unless_told() -> None:
    for drafts, told, records in ((0, None, 8), (1, None, 8), (3, None, 8), (7, None, 16), (7, 24, 24)):
        shape = decode_shape(2, 2, drafts)
        settings = replace(plan("verify", shape, form="deferred"), records=told)
        assert steps._note(settings, "deferred", shape).endswith(f"deferred states, {records} records a slot")


@pytest.mark.parametrize(("op", "form"), [("decode", "replay"), *[("verify", form) for form in SUFFIXES]])
def test_states_in_bfloat16_have_rows_of_their_own(op: Op, form: Form) -> None:
    shape = decode_shape(2, 2, 0 if op == "decode" else 3)
    plans = [replace(plan(op, shape, form=form), state_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    wide, narrow = (steps.measure(one, lambda line: None) for one in plans)
    assert wide.missed == narrow.missed == []
    for row, exact in zip(narrow.rows, wide.rows, strict=True):
        assert row.shape == f"{shape.name}_bf16"
        assert row.impl == exact.impl == f"torch{SUFFIXES[form]}"
        assert exact.err_state < 1e-5 < 5e-4 < row.err_state < 4e-3, "states err by their rounding"


def test_steps_report_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.prefill
    monkeypatch.setattr(ops, "prefill", lambda *args, **options: right(*args, **options).mul_(1.02))
    measured = steps.measure(plan("prefill", Shape("one", (40,), 2)), lambda line: None)
    assert len(measured.missed) == 1
    assert "torch one slow" in measured.missed[0]


def test_steps_report_what_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "prefill", lambda *args, **options: options["out"])
    measured = steps.measure(plan("prefill", Shape("one", (40,), 2)), lambda line: None)
    assert measured.rows[0].err_out == float("inf")
    assert len(measured.missed) == 1


class ZeroPeer:
    """Answers zeros."""

    name = "zero"

    def unmet(self, op: Op, inputs: Inputs) -> str:
        return ""

    def bind(self, inputs: Inputs) -> Bound:
        out, states = torch.zeros_like(inputs.v), torch.zeros_like(inputs.states)
        return Bound(lambda: None, lambda: (out, states), lambda: None)


def test_a_wrong_peer_is_told_and_fails_nothing() -> None:
    lines: list[str] = []
    measured = steps.measure(replace(plan("prefill", Shape("one", (40,), 2)), peers=(ZeroPeer(),)), lines.append)
    assert measured.missed == []
    assert [row.impl for row in measured.rows] == ["torch", "zero"]
    assert measured.rows[1].err_out == pytest.approx(1.0)
    assert [line for line in lines if "zero one slow: errors 1.0e+00" in line]


def test_io_bytes() -> None:
    # 8 x 2048 tokens, 16 heads x 128, bf16: q, k, v, g, o and beta once; 8 x 16 float32 states read and written
    tokens, states = 8 * 2048 * 16 * (5 * 128 + 1) * 2, 2 * 8 * 16 * 128 * 128 * 4
    shape = Shape("8x2048_h16", (2048,) * 8, 16)
    assert steps.io_bytes(shape, torch.bfloat16) == tokens + states
    assert steps.io_bytes(shape, torch.bfloat16, torch.bfloat16) == tokens + states // 2
    assert steps.state_bytes(shape, torch.float32) == states // 2
