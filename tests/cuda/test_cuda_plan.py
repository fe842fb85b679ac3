"""The planner: what it picks for the named workloads, and that its bounds hold for every plan."""

from __future__ import annotations

import math
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rapidkda.backends.cuda.host.plan import (
    CHUNK,
    MAX_PARTS,
    MOST_CHECKPOINT_BYTES,
    FormName,
    Plan,
    Scratch,
    forgetting_us,
    plan_prefill,
    workspace_bytes,
)
from rapidkda.testing import by_name

H200_SMS = 132


def planned(name: str) -> Plan:
    shape = by_name(name)
    chunks = [-(-length // CHUNK) for length in shape.seq_lens]
    return plan_prefill(len(chunks), sum(chunks), max(chunks), shape.hv, H200_SMS)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("8x2048_h16", "whole"),
        ("8x1024_h64", "whole"),
        ("4x8192_h64", "whole"),
        ("ragged_h64", "whole"),
        ("8x256_h16", "whole"),
        ("4x8192_h16", "pair"),
        ("2x8192_h16", "parallel"),
        ("1x8192_h64", "pair"),
        ("1x16384_h32", "parallel"),
        ("1x2048_h16", "parallel"),
        ("1x512_h64", "pair"),
        ("1x16384_h16", "parallel"),
        ("1x65536_h16", "parallel"),
        ("1x16384_h8", "parallel"),
    ],
)
def test_named_workloads_take_the_form_measured_best(name: str, form: str) -> None:
    assert planned(name).form == form


@given(
    segments=st.integers(1, 300),
    longest=st.integers(0, 5000),
    value_heads=st.integers(1, 96),
    sms=st.sampled_from([78, 114, 132]),
)
@settings(max_examples=300, deadline=None)
def test_a_plan_is_cheap_and_fits_the_device_and_the_workspace(
    segments: int, longest: int, value_heads: int, sms: int
) -> None:
    plan = plan_prefill(segments, segments * longest, longest, value_heads, sms)
    means = {}  # of the times where nothing is forgotten and where everything is
    for name, us in plan.alternatives:
        form, _, parts = name.partition("/")
        means[name] = math.sqrt(us * forgetting_us(cast(FormName, form), int(parts or 1), us, longest))
    chosen = f"{plan.form}/{plan.parts}" if plan.parts > 1 else plan.form
    assert means[chosen] == min(means.values())
    assert plan.predicted_us == dict(plan.alternatives)[chosen]
    if plan.parts > 1:
        assert 2 <= plan.parts <= MAX_PARTS
        assert 2 * segments * value_heads * plan.parts <= sms  # two CTAs a part, all at once
    tokens = segments * longest * CHUNK
    assert Scratch(segments, tokens, value_heads, plan.parts).bytes <= workspace_bytes(tokens, value_heads, sms)
    assert (plan.parts > 1) == (plan.form == "parallel")


@given(checkpoints=st.integers(0, 5000), value_heads=st.integers(1, 33))
@settings(max_examples=100, deadline=None)
def test_checkpoints_within_parts_have_a_bound(checkpoints: int, value_heads: int) -> None:
    plan = plan_prefill(1, 1024, 1024, value_heads, H200_SMS, checkpoints=checkpoints)
    without, needed = (Scratch(1, 0, value_heads, plan.parts, count).bytes for count in (0, checkpoints))
    assert needed - without <= MOST_CHECKPOINT_BYTES
    assert plan.parts > 1 or checkpoints > 0


@given(checkpoints=st.integers(0, 300), value_heads=st.integers(1, 33), longest=st.integers(1, 4096))
@settings(max_examples=100, deadline=None)
def test_parts_fit_the_workspace_that_is_given(checkpoints: int, value_heads: int, longest: int) -> None:
    tokens = longest * CHUNK
    given_bytes = workspace_bytes(tokens, value_heads, H200_SMS)
    sizes = (1, longest, longest, value_heads, H200_SMS)
    plan = plan_prefill(*sizes, checkpoints=checkpoints, tokens=tokens, most_scratch=given_bytes)
    assert Scratch(1, tokens, value_heads, plan.parts, checkpoints).bytes <= given_bytes
    if checkpoints == 0:
        assert plan == plan_prefill(*sizes)


def test_one_checkpoint_costs_one_part_of_a_given_workspace() -> None:
    sizes, tokens = (1, 1024, 1024, 16, H200_SMS), 16384
    given_bytes = workspace_bytes(tokens, 16, H200_SMS)
    assert plan_prefill(*sizes, checkpoints=1).parts == 4
    assert plan_prefill(*sizes, checkpoints=1, tokens=tokens, most_scratch=given_bytes).parts == 3


def test_a_plan_prints_every_alternative() -> None:
    text = str(planned("1x16384_h16"))
    assert text.startswith("parallel in 4 parts")
    assert "whole" in text
    assert "pair" in text
