"""Segment tables that calls without any share."""

from __future__ import annotations

import pytest
import torch

from rapidkda.ops import tables

CPU = torch.device("cpu")


def test_a_table_is_made_once() -> None:
    one = tables.equal(3, 5, CPU)
    assert one is tables.equal(3, 5, CPU)
    assert one.first_token.tolist() == [0, 5, 10]
    assert one.length.tolist() == [5, 5, 5]
    assert one is not tables.equal(3, 6, CPU)


def test_tables_are_bounded_and_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph may read one for ever; calls of any number of sizes must not fill the memory."""
    monkeypatch.setattr(tables, "_kept", {})
    monkeypatch.setattr(tables, "_MOST", 2)
    first, second = tables.equal(1, 1, CPU), tables.equal(2, 1, CPU)
    third = tables.equal(3, 1, CPU)
    assert third.first_token.tolist() == [0, 1, 2]
    assert third is not tables.equal(3, 1, CPU)
    assert tables.equal(1, 1, CPU) is first
    assert tables.equal(2, 1, CPU) is second
