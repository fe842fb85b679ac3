"""Every wrong call raises the right exception, names its argument and writes nothing; also under `python -O`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rapidkda
from bad_arguments import CALLS, GOOD, BadCall, problem_with
from bad_arguments.registry import HV, V
from bad_arguments.steps import out_beside_v
from rapidkda import Checkpoints, Segments


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_bad_call_is_refused(call: BadCall) -> None:
    problem = problem_with(call)
    assert problem is None, problem


@pytest.mark.parametrize("op", GOOD)
def test_the_call_that_they_spoil_is_good(op: str) -> None:
    function, good = GOOD[op]
    function(**good())


def test_there_are_enough_distinct_calls() -> None:
    assert len({call.id for call in CALLS}) == len(CALLS) >= 60
    operators = {function for function, _ in GOOD.values()}
    public = {getattr(rapidkda, name) for name in rapidkda.__all__ if not isinstance(getattr(rapidkda, name), type)}
    assert operators == public, "an operator has no bad calls"


def test_an_output_beside_its_inputs_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column slices of one buffer share a range of addresses and no element."""
    monkeypatch.setenv("RAPIDKDA_CHECK", "1")
    function, good = GOOD["prefill"]
    arguments = good()
    want = function(**arguments).clone()
    arguments = out_beside_v(good(), HV * V)
    assert torch.equal(function(**arguments), want)


def test_a_norm_in_place_or_beside_its_input_is_good() -> None:
    """Whatever tensor says so, and whether the kind of call is known."""
    function, good = GOOD["gated_rms_norm"]
    arguments = good()
    want, x = function(**arguments).clone(), arguments["x"].clone()
    count, heads, dim = x.shape
    beside, after = x.new_zeros(count, 2 * heads, dim), x.new_zeros(2 * count, heads, dim)
    for here, out in (
        (beside[:, :heads], beside[:, heads:]),
        (beside[:, :heads], beside[:, :heads]),
        (after[:count], after[count:]),
        (after[:count], after[:count]),
    ):
        for _ in range(2):
            here.copy_(x)
            assert torch.equal(function(**arguments | {"x": here, "out": out}), want)


def test_a_segment_table_bounds_its_own_lengths() -> None:
    """What the host is told of a table must be that table: its maximum sizes launches and outputs."""
    packed = Segments.from_lengths([3, 2])
    assert packed.host is not None
    with pytest.raises(ValueError, match=r"segments\.max_length must bound every length, 3 too, got 2"):
        Segments(packed.first_token, packed.length, 2, packed.host)
    with pytest.raises(ValueError, match=r"segments\.host .* 2 segments"):
        Segments(packed.first_token, packed.length, 3, Segments.from_lengths([3]).host)


@pytest.mark.parametrize("entries", [[(0, 16.5, 1)], [(0, 16), (1, 16), (2, 16)], [0, 16, 1], [(True, True, True)]])
def test_checkpoints_are_records_of_three_ints(entries: list[Any]) -> None:
    with pytest.raises(TypeError, match=r"checkpoints must be \(segment, offset, slot\) records of ints"):
        Checkpoints.build(entries, 3)


@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
def test_checkpoints_rise_within_a_segment(host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAPIDKDA_CHECK", "1")
    function, good = GOOD["prefill"]
    sorted_table = Checkpoints.build([(0, 16, 2), (1, 32, 3), (1, 48, 0)], 2)
    begin, offset, slot = (x.clone() for x in (sorted_table.begin, sorted_table.offset, sorted_table.slot))
    offset[1:] = offset[1:].flip(0)
    values = tuple(x.numpy().astype("int64") for x in (begin, offset, slot)) if host else None
    arguments = good() | {"checkpoints": Checkpoints(begin, offset, slot, values)}
    with pytest.raises(ValueError, match=r"offsets that rise within a segment, got \[16, 48, 32\]"):
        function(**arguments)


def test_checks_hold_without_asserts() -> None:
    tests = Path(__file__).parent
    command = [sys.executable, "-O", "-m", "bad_arguments"]
    where = {**os.environ, "PYTHONPATH": str(Path(rapidkda.__file__).parents[1])}
    result = subprocess.run(command, cwd=tests, env=where, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert f"{len(CALLS)} of {len(CALLS)} bad calls refused" in result.stdout
