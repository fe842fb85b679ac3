"""Decode, verification in both forms and commit of the torch backend."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rapidkda import Segments, ops
from rapidkda.backends.torch import recurrent
from rapidkda.problem import ROLLBACKS
from rapidkda.testing.accuracy import check_decode, check_verify
from rapidkda.testing.inputs import activated
from rapidkda.testing.regimes import REGIMES
from rapidkda.testing.shapes import Shape
from rapidkda.testing.tolerances import relative_error

CPU = torch.device("cpu")
SHAPE = Shape("requests", (1,) * 9, 2, value_heads=4, key_dim=64, value_dim=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("regime", REGIMES)
def test_decode_and_verify_are_within_the_bars(regime: str, dtype: torch.dtype) -> None:
    checks = [check_decode(SHAPE, regime, dtype, CPU, "torch", 1)]
    checks += [check_verify(SHAPE, regime, dtype, CPU, "torch", 2, rollback) for rollback in ROLLBACKS]
    assert all(check.passed for check in checks), checks


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("slots", [[3, 4, 5, 6], [6, 1, 9, 3]], ids=["neighbours", "scattered"])
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
def test_decode_touches_its_slots_only(
    v_first: bool, slots: list[int], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "CPU_BLOCK", 3 * 2 * 16 * 32)  # three rows at once
    inputs = activated([1, 1, 1, 1], key_dim=32, value_dim=16)
    states = inputs.states if v_first else inputs.states.transpose(-1, -2).contiguous()
    storage = torch.full((11, states[0].numel() + 8 * padded), 1000.0)
    pool = storage[:, : states[0].numel()].view(11, *states.shape[1:])
    pool[slots] = states
    before = storage.clone()
    out = ops.decode(
        *inputs.operands(), **inputs.options(), state=pool, slots=torch.tensor(slots), state_v_first=v_first,
        backend="torch",
    )  # fmt: skip
    want, final = inputs.expected()
    assert relative_error(out, want) < 1e-6
    assert relative_error(pool[slots], final if v_first else final.transpose(-1, -2)) < 1e-6
    others = [n for n in range(11) if n not in slots]
    assert torch.equal(storage[others], before[others])


@pytest.mark.parametrize(
    ("read", "write"),
    [
        ([0, 1, 2], [1, 2, 0]),  # each reads what another one writes
        ([0, 0, 2], [3, 0, 4]),  # a fork of a slot that moves on
        ([0, 1, 2], [1, 2, 3]),  # a shift by one, either way
        ([1, 2, 3], [0, 1, 2]),
        ([0, 1, 2], [3, 4, 5]),
        ([0, 1, 2], [5, 3, 4]),
        ([2, 0, 1], [3, 4, 5]),
        ([2, 0, 1], [2, 0, 1]),
    ],
)
@pytest.mark.parametrize("block", [1, 2 * 2 * 16 * 32])
def test_decode_reads_before_it_writes(
    read: list[int], write: list[int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "CPU_BLOCK", block)
    inputs = activated([1, 1, 1], key_dim=32, value_dim=16)
    pool = torch.randn(6, 2, 16, 32)
    before = pool.clone()
    out = ops.decode(
        *inputs.operands(), **inputs.options(), state=pool, slots=torch.tensor(write), read_slots=torch.tensor(read),
        backend="torch",
    )  # fmt: skip
    want, final = inputs.expected(states=before[read])
    assert relative_error(out, want) < 1e-6
    assert relative_error(pool[write], final) < 1e-6
    others = [n for n in range(6) if n not in write]
    assert torch.equal(pool[others], before[others])


def test_padding_and_absent_rows() -> None:
    inputs = activated([1, 0, 1, 1], key_dim=32, value_dim=16)
    pool = torch.cat([inputs.states, torch.full_like(inputs.states, float("nan"))])
    before = pool.clone()
    out = torch.full_like(inputs.v, float("nan"))
    ops.decode(
        *inputs.operands(), **inputs.options(), segments=inputs.segments, state=pool, out=out,
        slots=torch.tensor([0, 1, -1, 99]), backend="torch",
    )  # fmt: skip
    want, final = inputs.expected()
    assert relative_error(out[0], want[0]) < 1e-6
    assert not out[1:].any()
    assert relative_error(pool[0], final[0]) < 1e-6
    assert torch.equal(pool[1:4], before[1:4])


def test_replay_drops_what_was_not_accepted() -> None:
    inputs = activated([4, 4, 4], key_dim=32, value_dim=16)
    pool = inputs.states.clone()
    records = torch.full((3, 4, 2, 2 * 32 + 16), float("nan"))
    slots = torch.arange(3)
    ops.verify(
        *inputs.operands(), **inputs.options(), segments=inputs.segments, state=pool, slots=slots,
        accepted=torch.zeros(3, dtype=torch.int32), records=records, backend="torch",
    )  # fmt: skip
    assert torch.equal(pool, inputs.states)
    records[1, 2:], records[2] = float("nan"), float("inf")
    accepted = torch.tensor([4, 2, 0])
    ops.commit(state=pool, records=records, held=None, slots=slots, accepted=accepted, backend="torch")
    taken = dataclasses.replace(inputs, segments=Segments.from_lengths(accepted.tolist(), first_token=[0, 4, 8]))
    _, final = taken.expected()
    assert relative_error(pool, final) < 1e-6
    assert torch.equal(pool[2], inputs.states[2])


def test_slot_per_position_keeps_every_state() -> None:
    inputs = activated([3, 1, 2], key_dim=32, value_dim=16)
    pool = torch.full((12, 2, 16, 32), 1000.0)
    slots = torch.tensor([[0, 5, 2], [7, 8, -1], [11, 3, 4]])
    pool[slots[[0, 1, 2], [1, 0, 0]]] = inputs.states
    ops.verify(
        *inputs.operands(), **inputs.options(), segments=inputs.segments, state=pool, slots=slots,
        accepted=torch.tensor([2, 0, 1]), backend="torch",
    )  # fmt: skip
    for n, (first, length) in enumerate(inputs.spans):
        for j in range(length):
            lens = [j + 1 if i == n else 0 for i in range(3)]
            part = dataclasses.replace(inputs, segments=Segments.from_lengths(lens, first_token=[first] * 3))
            assert relative_error(pool[slots[n, j]], part.expected()[1][n]) < 1e-6
    assert (pool[[1, 4, 6, 8, 9, 10]] == 1000.0).all()
