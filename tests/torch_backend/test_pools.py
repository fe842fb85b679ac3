"""State pools of the torch backend: slots, padding, fresh and empty segments, checkpoints, layouts, dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rapidkda import Segments, ops
from rapidkda.backends.torch import pools
from rapidkda.segments import Checkpoints
from rapidkda.testing.inputs import Inputs, activated
from rapidkda.testing.tolerances import relative_error

CANARY = 1000.0


def call(inputs: Inputs, pool: Tensor, slots: Tensor, **options: object) -> Tensor:
    out = torch.full(inputs.v.shape, float("nan"), dtype=inputs.v.dtype)
    keywords = {"segments": inputs.segments, "state": pool, "slots": slots, "out": out, "backend": "torch"}
    return ops.prefill(*inputs.operands(), **inputs.options(), **{**keywords, **options})


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [True, False])
def test_slots_padding_fresh_and_empty(state_dtype: torch.dtype, v_first: bool) -> None:
    inputs = activated([40, 17, 0, 0, 5, 9, 3], gaps=True, key_dim=32, value_dim=16)
    states = inputs.states.to(state_dtype)
    inner = (2, 16, 32) if v_first else (2, 32, 16)
    storage = torch.full((12, 2 * 16 * 32 + 64), CANARY, dtype=state_dtype)  # slots are padded
    pool = storage[:, : 2 * 16 * 32].view(12, *inner)
    slots = torch.tensor([5, 2, 7, 3, 9, -1, 40])  # the last two are padding
    stored = states if v_first else states.transpose(-1, -2)
    pool[slots[:5]] = stored[:5]
    pool[2] = float("nan")  # fresh: whatever is there must not matter
    pool[3] = float("nan")
    before = storage.clone()
    fresh = torch.tensor([True, False, True, False, True, True, True])
    out = call(inputs, pool, slots, has_initial_state=fresh, state_v_first=v_first)
    want, final = inputs.expected(states=states.float() * fresh[:, None, None, None])
    for n, (first, length) in enumerate(inputs.spans):
        rows = out[first : first + length]
        if n < 5 and length:
            assert relative_error(rows, want[first : first + length]) < 2e-6
            got = pool[slots[n]] if v_first else pool[slots[n]].transpose(-1, -2)
            assert relative_error(got, final[n]) < (2e-6 if state_dtype == torch.float32 else 4e-3)
        if n >= 5:
            assert not rows.any()
    assert torch.equal(pool[7], before[7, : 2 * 16 * 32].view(inner))  # empty, continued
    assert not pool[3].any()  # empty, fresh
    untouched = [0, 1, 4, 6, 8, 10, 11]
    assert torch.equal(storage[untouched], before[untouched])
    assert torch.equal(storage[:, 2 * 16 * 32 :], before[:, 2 * 16 * 32 :])
    covered = torch.cat([torch.arange(first, first + length) for first, length in inputs.spans])
    gaps = torch.ones(out.shape[0], dtype=torch.bool).index_fill(0, covered, False)
    assert out[gaps].isnan().all()


def test_read_slots_of_other_rows_are_read_first() -> None:
    inputs = activated([20, 20])
    pool = inputs.states.clone()
    call(inputs, pool, torch.tensor([0, 1]), read_slots=torch.tensor([1, 0]))
    _, final = inputs.expected(states=inputs.states.flip(0))
    assert relative_error(pool, final) < 2e-6


def test_checkpoints_are_the_states_on_the_way() -> None:
    inputs = activated([150, 64, 63, 200], heads=1, key_dim=32, value_dim=16)
    entries = [(0, 64, 3), (0, 128, 0), (1, 64, 5), (3, 16, 1), (3, 192, 6), (3, 48, 2)]
    exported = torch.full((8, 1, 16, 32), CANARY)
    call(
        inputs,
        inputs.states.clone(),
        torch.arange(4),
        checkpoints=Checkpoints.build(entries, 4),
        checkpoint_pool=exported,
    )
    for n, offset, slot in entries:
        part = activated([150, 64, 63, 200], heads=1, key_dim=32, value_dim=16)
        lens = [offset if i == n else 0 for i in range(4)]
        part.segments = Segments.from_lengths(lens, first_token=[first for first, _ in inputs.spans])
        part.__post_init__()
        _, states = part.expected()
        assert relative_error(exported[slot], states[n]) < 2e-6
    assert (exported[[4, 7]] == CANARY).all()


@pytest.mark.parametrize("mask", [[True, False, True], [False, False, False], [False, True, True]])
def test_masked_writes_without_a_host_copy(mask: list[bool]) -> None:
    """Both ways of writing rows agree: compaction on a CPU, redirection elsewhere."""
    slots, values = torch.tensor([4, 40, 1]), torch.randn(3, 2, 5)
    slots[1] = 2 if mask[1] else 40
    expected = torch.randn(6, 2, 5)
    got = expected.clone()
    for n in range(3):
        if mask[n]:
            expected[slots[n]] = values[n]
    redirected = got.clone()
    pools.write_rows(got, slots, values, torch.tensor(mask))
    pools.redirect_rows(redirected, slots, values, torch.tensor(mask))
    assert torch.equal(got, expected)
    assert torch.equal(redirected, expected)
