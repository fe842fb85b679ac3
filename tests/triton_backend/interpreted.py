"""The kernels against float64 under Triton's interpreter, on a CPU. Run by test_triton_interpreter.py, which sets
TRITON_INTERPRET; tokens are few, since an interpreted kernel is thousands of times slower.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rapidkda import ops
from rapidkda.backends.triton import plan
from rapidkda.backends.triton import prefill as triton_prefill
from rapidkda.backends.triton.tiles import tiles_kernel
from rapidkda.ops import kinds
from rapidkda.segments import Checkpoints, Segments
from rapidkda.testing import tolerances
from rapidkda.testing.inputs import Inputs, activated, make_inputs
from rapidkda.testing.shapes import Shape

CANARY = 1000.0


@pytest.fixture(autouse=True)
def poisoned_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch holds NaN, so that nothing is read before it is written."""
    monkeypatch.setattr(triton_prefill, "_workspace", lambda call, size: torch.full((size,), 0x7F, dtype=torch.uint8))


def run(
    inputs: Inputs, state_dtype: torch.dtype = torch.float32, v_first: bool = True, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, states [N, HV, V, K] and what the states started from; every other slot must stay as it is."""
    count = len(inputs.spans)
    slots = torch.randperm(count + 2, generator=torch.Generator().manual_seed(1))[:count]
    pool = torch.full((count + 2, *inputs.states.shape[1:]), CANARY, dtype=state_dtype)
    pool[slots] = inputs.states.to(state_dtype)
    starts = pool[slots].float()
    pool = pool if v_first else pool.transpose(-1, -2).contiguous()
    out = torch.full_like(inputs.v, float("nan"))
    ops.prefill(
        *inputs.operands(),
        segments=inputs.segments,
        state=pool,
        slots=slots.to(torch.int32),
        state_v_first=v_first,
        out=out,
        backend="triton",
        **inputs.options(),
        **options,
    )
    others = [row for row in range(count + 2) if row not in slots.tolist()]
    assert (pool[others] == CANARY).all()
    return out, pool[slots] if v_first else pool[slots].transpose(-1, -2), starts


def check(inputs: Inputs, bar: tolerances.Bar, **options: object) -> None:
    out, states, starts = run(inputs, **options)  # type: ignore[arg-type]
    want_out, want_states = inputs.expected(states=starts)
    assert tolerances.worst_output_error(out, want_out, inputs.spans) <= bar.out
    assert tolerances.worst_state_error(states, want_states) <= bar.state


@pytest.mark.parametrize("regime", ["slow", "collinear", "staggered", "unbounded"])
def test_half_precision(regime: str) -> None:
    shape = Shape("ragged", (37, 1, 0, 16), 1, 2, 128, 64)
    inputs = make_inputs(shape, regime, dtype=torch.bfloat16, layout="fused", gaps=True)
    check(inputs, tolerances.bar(regime, torch.bfloat16))


@pytest.mark.parametrize("regime", ["mixed", "unbounded"])
def test_float32_in_the_other_state_layout(regime: str) -> None:
    inputs = make_inputs(Shape("ragged", (35, 3), 2, 2, 64, 128), regime)
    check(inputs, tolerances.bar(regime, torch.float32), v_first=False)


@pytest.mark.parametrize(("regime", "dtype"), [("slow", torch.bfloat16), ("unbounded", torch.float32)])
def test_parts_side_by_side_are_exact(regime: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of five parts, of one, of an empty one and of three, with gates that forget nothing."""
    monkeypatch.setattr(plan, "cut", lambda *call: plan.Cut(10, 1, later=6, middle=4))
    inputs = make_inputs(Shape("ragged", (70, 1, 0, 33), 1, 1, 64, 64), regime, dtype=dtype, gaps=True)
    check(inputs, tolerances.bar(regime, dtype))


@pytest.mark.parametrize("cut", [plan.NO_CUT, plan.Cut(3, 7, later=2, middle=1)], ids=["whole", "parts"])
def test_a_segment_of_many_tiles_runs_from_its_first(cut: plan.Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough of them that a first part of another length than the others begins and ends between tiles."""
    monkeypatch.setattr(plan, "cut", lambda *call: cut)
    inputs = make_inputs(Shape("long", (330,), 1, 1, 64, 64), "slow", dtype=torch.bfloat16)
    check(inputs, tolerances.bar("slow", torch.bfloat16))


def test_the_table_orders_segments_from_the_longest_to_the_shortest() -> None:
    """More segments than a block of the table's kernel, empty ones and equals (in their own order) among them."""
    lengths = torch.randint(0, 60, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    segments = Segments.from_lengths(lengths)
    tiles = plan.max_tiles(sum(lengths), len(lengths))
    table = torch.full((3 * 151 + 150 + 10 + 2 * tiles,), -7, dtype=torch.int32)
    tiles_kernel[(151,)](
        table,
        segments.first_token,
        segments.length,
        sum(lengths),
        150,
        tiles,
        0,
        10,
        plan.NO_CUT.part_tiles,
        1,
        1,
        plan.CHUNK,
        128,
    )
    order = table[3 * 151 :][:150].tolist()
    assert order == sorted(range(150), key=lambda n: -lengths[n])
    line = table[2 * 151 :][:151].diff().tolist()
    assert line == [-(-lengths[n] // plan.CHUNK) + plan.STATE_TILES for n in order]
    assert (table[3 * 151 + 150 :][:10] == 0).all()


def test_extreme_gates_meet_weak_ones() -> None:
    """Log decays far below any bound, among tokens that hardly decay: every factor must stay in range."""
    gates = torch.full((40, 2, 64), -0.01)
    gates[7, :, ::2] = -300.0
    gates[20:24] = -20.0
    inputs = activated([40], gates, heads=2, key_dim=64, value_dim=64)
    check(inputs, tolerances.case_bar(torch.float32))


@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_values_of_any_magnitude(size: float) -> None:
    """float16 holds the corrections: their scale is taken out, so tiny and huge values lose nothing."""
    inputs = make_inputs(Shape("one", (40,), 1, 1, 64, 64), "slow", dtype=torch.bfloat16)
    inputs.v = (inputs.v.float() * size).to(torch.bfloat16)
    inputs.states = inputs.states * size
    check(inputs, tolerances.bar("slow", torch.bfloat16))


@pytest.mark.parametrize("kind", ["bounded", "unbounded"])
def test_later_tokens_change_no_earlier_bit(kind: str) -> None:
    regime = "fast" if kind == "bounded" else "unbounded"
    inputs = make_inputs(Shape("one", (24,), 1, 1, 64, 64), regime, dtype=torch.bfloat16)
    before = run(inputs)[0]
    for operand in inputs.operands():
        operand[9:] = torch.randn(operand[9:].shape).to(operand.dtype)
    inputs.g[9::2] = 40.0
    after = run(inputs)[0]
    assert torch.equal(before[:9], after[:9])
    assert not torch.equal(before[9:], after[9:])


@pytest.mark.parametrize("shares", [1, 3, 8])
def test_programs_that_share_chains_change_no_bit(shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of many tiles, of few and of none, one of them of a padded row; states are handed over within chains."""
    inputs = make_inputs(Shape("ragged", (90, 1, 0, 33), 2, 2, 64, 64), "slow", dtype=torch.bfloat16, gaps=True)

    def both() -> tuple[Tensor, Tensor]:
        pool = inputs.states.clone()
        out = torch.full_like(inputs.v, float("nan"))
        slots = torch.tensor([3, 1, -1, 0])
        ops.prefill(
            *inputs.operands(),
            segments=inputs.segments,
            state=pool,
            slots=slots,
            out=out,
            backend="triton",
            **inputs.options(),
        )
        return torch.cat([out[first : first + length] for first, length in inputs.spans]), pool

    want_out, want_pool = both()
    monkeypatch.setattr(plan, "shares", lambda *call: shares)
    kinds.forget()
    out, pool = both()
    assert torch.equal(out, want_out)
    assert torch.equal(pool, want_pool)


@pytest.mark.parametrize(
    ("cut", "shares"),
    [(plan.NO_CUT, 0), (plan.Cut(7, 1, later=4, middle=2), 0), (plan.NO_CUT, 2)],
    ids=["whole", "parts", "shares"],
)
def test_exported_states(cut: plan.Cut, shares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from first, middle and last parts, where sequences are cut into four, one and two; and from two shares."""
    monkeypatch.setattr(plan, "cut", lambda *call: cut)
    monkeypatch.setattr(plan, "shares", lambda *call: shares)
    inputs = make_inputs(Shape("ragged", (50, 16, 20), 1, 1, 64, 64), "slow")
    table = [(0, 16, 3), (0, 48, 0), (1, 16, 1), (2, 16, 4), (2, 16, 2)]
    exported = torch.full((6, 1, 64, 64), CANARY)
    check(
        inputs,
        tolerances.bar("slow", torch.float32),
        checkpoints=Checkpoints.build(table, 3),
        checkpoint_pool=exported,
    )
    for segment, offset, slot in table:
        first, _ = inputs.spans[segment]
        head = Inputs(
            *(x[first : first + offset] for x in inputs.operands()),
            segments=inputs.segments.from_lengths([offset]),
            states=inputs.states[segment : segment + 1],
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
            lower_bound=inputs.lower_bound,
        )
        assert tolerances.worst_state_error(exported[slot : slot + 1], head.expected()[1]) <= 2e-6
    assert (exported[5] == CANARY).all()


def test_padding_rows_are_zero_and_touch_nothing() -> None:
    inputs = make_inputs(Shape("pad", (20, 5), 1, 1, 64, 64), "slow", dtype=torch.bfloat16)
    pool = torch.full((3, 1, 64, 64), CANARY)
    for slots in ([-1, 7], [-1, -1]):
        out = torch.full_like(inputs.v, float("nan"))
        ops.prefill(
            *inputs.operands(),
            segments=inputs.segments,
            state=pool,
            slots=torch.tensor(slots),
            out=out,
            backend="triton",
            **inputs.options(),
        )
        assert (out == 0).all()
        assert (pool == CANARY).all()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_decode(state_dtype: torch.dtype) -> None:
    inputs = make_inputs(Shape("step", (1, 1, 1), 1, 2, 64, 128), "unbounded", layout="fused", gaps=True)
    pool = torch.full((5, 2, 128, 64), CANARY, dtype=state_dtype)
    slots = torch.tensor([4, 1, 2])
    pool[slots] = inputs.states.to(state_dtype)
    starts = pool[slots].float()
    out = torch.full_like(inputs.v, float("nan"))
    ops.decode(
        *inputs.operands(),
        segments=inputs.segments,
        state=pool,
        slots=torch.tensor([4, -1, 2]),
        out=out,
        backend="triton",
        **inputs.options(),
    )
    want_out, want_states = inputs.expected(states=starts)
    spans = [inputs.spans[0], inputs.spans[2]]
    bar = tolerances.case_bar(torch.float32, state_dtype)
    assert tolerances.worst_output_error(out, want_out, spans) <= bar.out
    assert tolerances.worst_state_error(pool[[4, 2]], want_states[[0, 2]]) <= bar.state
    assert (out[inputs.spans[1][0]] == 0).all()
    assert torch.equal(pool[1].float(), starts[1])


@pytest.mark.parametrize(
    ("width", "steps"),  # accepted of the step before, tokens of this one
    [(2, [(1, 2), (2, 1), (9, 2)]), (4, [(1, 3), (2, 1), (9, 2)]), (12, [(1, 12), (11, 9), (99, 2)])],
)
def test_both_forms_of_verification_agree_with_one_token_after_another(
    width: int, steps: list[tuple[int, int]]
) -> None:
    """Three steps of drafts with changing accepted counts, 0 and too large ones among them, and chunks of 8 filled."""
    pool = torch.full((1 + width, 1, 64, 64), float("nan"))
    replayed = torch.full((1, 1, 64, 64), float("nan"))
    records = torch.full((1, width, 1, 192), float("nan"))
    state = 0.1 * torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    pool[1], replayed[0] = state[0], state[0]
    states = [state] * width
    for number, (accepted, count) in enumerate(steps):
        inputs = make_inputs(Shape("drafts", (count,), 1, 1, 64, 64), "slow", seed=number)
        start = states[min(max(accepted, 1), width) - 1] if number else state
        outs = []
        for form, taken in (("slots", accepted), ("replay", accepted if number else 0)):
            slots = {
                "state": pool if form == "slots" else replayed,
                "slots": torch.arange(1, 1 + width)[None] if form == "slots" else torch.zeros(1, dtype=torch.int32),
                "records": None if form == "slots" else records,
            }
            outs.append(
                ops.verify(
                    *inputs.operands(),
                    segments=inputs.segments,
                    accepted=torch.tensor([taken if number != 2 else 1]),
                    backend="triton",
                    **slots,
                    **inputs.options(),
                )
            )
        start = states[0] if number == 2 else start
        want, _ = inputs.expected(states=start)
        for out in outs:
            assert tolerances.worst_output_error(out, want, inputs.spans) <= 1e-5
        states = list(states)
        for token in range(count):
            head = Inputs(
                *(x[: token + 1] for x in inputs.operands()),
                segments=inputs.segments.from_lengths([token + 1]),
                states=start,
                A_log=inputs.A_log,
                dt_bias=inputs.dt_bias,
                lower_bound=inputs.lower_bound,
            )
            states[token] = head.expected()[1].float()
    ops.commit(
        state=replayed,
        records=records,
        held=None,
        slots=torch.tensor([0]),
        accepted=torch.tensor([2]),
        backend="triton",
    )
    assert tolerances.worst_state_error(replayed, states[1].double()) <= 1e-5


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolution(channels_last: bool) -> None:
    """Against float64, split at every kind of point, in place, with tails and an empty segment."""
    from rapidkda import reference
    from rapidkda.segments import Segments

    lens, channels, width = [150, 2, 0, 5], 40, 4
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(lens), channels, generator=generator)
    weight = torch.randn(channels, width, generator=generator)
    history = torch.randn(6, 3, channels, generator=generator)
    pool = (history if channels_last else history.transpose(1, 2)).contiguous().clone()
    slots = torch.tensor([5, 0, 2, 3], dtype=torch.int32)
    fresh = torch.tensor([True, True, True, False])
    out = ops.causal_conv(
        x,
        weight,
        segments=Segments.from_lengths(lens),
        state=pool,
        slots=slots,
        has_initial_state=fresh,
        channels_last=channels_last,
        backend="triton",
    )
    got = pool if channels_last else pool.transpose(1, 2)
    first = 0
    for n, length in enumerate(lens):
        old = history[slots[n]] if fresh[n] else torch.zeros(3, channels)
        want, window = reference.causal_conv(x[first : first + length], weight, None, old)
        assert tolerances.relative_error(out[first : first + length], want) <= 1e-6
        assert torch.equal(got[slots[n]].double(), window)
        first += length
    assert torch.equal(got[[1, 4]], history[[1, 4]])


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_gated_norm(activation: str) -> None:
    from rapidkda import reference

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2 * 96, generator=generator)[:, 48:144].unflatten(1, (2, 48))
    z = torch.randn(5, 2, 48, generator=generator)
    weight = torch.randn(48, generator=generator)
    got = ops.gated_rms_norm(x, z, weight, activation=activation, backend="triton")  # type: ignore[arg-type]
    want = reference.gated_rms_norm(x, z, weight, 1e-5, activation)
    assert tolerances.relative_error(got, want) <= 1e-6


def test_a_segment_to_norm_may_take_more_programs_than_an_axis_has(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(8)
    x, z = (torch.randn(230, 1, 256, generator=generator) for _ in range(2))
    weight = torch.randn(256, generator=generator)
    monkeypatch.setattr(plan, "MAX_GRID", 3)
    segments = Segments.from_lengths([200, 0, 17], first_token=[1, 201, 210])
    out = ops.gated_rms_norm(x, z, weight, segments=segments, out=torch.full_like(x, CANARY), backend="triton")
    want = ops.gated_rms_norm(x, z, weight, backend="triton")
    covered = torch.tensor([1 <= n < 201 or 210 <= n < 227 for n in range(230)])
    assert torch.equal(out[covered], want[covered])
    assert (out[~covered] == CANARY).all()
