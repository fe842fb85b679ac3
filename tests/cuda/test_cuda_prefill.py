"""Every form of the prefill kernel, whatever the planner would choose, against float64."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rapidkda import ops
from rapidkda.backends.base import Request
from rapidkda.backends.cuda import CudaBackend, compiler
from rapidkda.backends.cuda.host import prefill as host
from rapidkda.backends.cuda.host.plan import Plan
from rapidkda.device import Device
from rapidkda.ops import kinds
from rapidkda.segments import Checkpoints
from rapidkda.testing import Inputs, Shape, activated, bar, make_inputs, worst_output_error, worst_state_error
from rapidkda.testing.regimes import Raw, Regime, logit
from rapidkda.testing.tolerances import relative_error

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or importlib.util.find_spec("cuda.core") is None:
    pytest.skip("needs a GPU and cuda-core", allow_module_level=True)
DEVICE = torch.device("cuda", torch.cuda.current_device())
UNMET = CudaBackend().unmet(Request("prefill", Device.of(DEVICE)))
if UNMET:
    pytest.skip("; ".join(UNMET), allow_module_level=True)

RAGGED = Shape("ragged", (150, 64, 17, 1, 0, 66), 2)
GROUPED = Shape("grouped", (70, 33), 1, 3)
FORMS = (("whole", 1), ("pair", 1), ("parallel", 2), ("parallel", 3))


@pytest.fixture(params=FORMS, ids=lambda form: f"{form[0]}{form[1]}")
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Makes the planner choose one form for everything."""
    name, parts = request.param
    monkeypatch.setattr(host, "plan", lambda call, sms: Plan(name, parts, 0.0, ()))
    kinds.forget()  # they hold plans
    yield str(name)
    kinds.forget()


def run(inputs: Inputs, state_dtype: torch.dtype = torch.float32, v_first: bool = True) -> tuple[torch.Tensor, ...]:
    """Outputs, and final states V-first, of a call on a pool with permuted slots."""
    count = len(inputs.spans)
    slots = torch.randperm(count + 2, generator=torch.Generator().manual_seed(1))[:count].to(DEVICE)
    states = inputs.states if v_first else inputs.states.transpose(-1, -2)
    pool = torch.full((count + 2, *states.shape[1:]), float("nan"), dtype=state_dtype, device=DEVICE)
    pool[slots] = states.to(state_dtype)
    out = torch.full(inputs.v.shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)
    ops.prefill(
        *inputs.operands(),
        **inputs.options(),
        segments=inputs.segments,
        state=pool,
        slots=slots,
        state_v_first=v_first,
        out=out,
        backend="cuda",
    )
    final = pool[slots].float()
    return out, final if v_first else final.transpose(-1, -2)


def errors(inputs: Inputs, out: torch.Tensor, final: torch.Tensor) -> tuple[float, float]:
    want, state = inputs.expected()
    return worst_output_error(out, want, inputs.spans), worst_state_error(final, state)


@pytest.mark.parametrize("shape", [RAGGED, GROUPED], ids=lambda shape: shape.name)
@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32], ids=["g16", "g32"])
@pytest.mark.parametrize("regime", ["fast", "slow", "mixed", "collinear", "staggered", "unbounded"])
def test_every_form_meets_the_bar(form: str, regime: str, g_dtype: torch.dtype, shape: Shape) -> None:
    inputs = make_inputs(
        shape, regime, dtype=torch.bfloat16, device=DEVICE, seed=4, layout="fused", gaps=True, g_dtype=g_dtype
    )
    inputs.states = inputs.states.bfloat16().float()
    err_out, err_state = errors(inputs, *run(inputs))
    limit = bar(regime, torch.bfloat16)
    assert err_state <= limit.state
    lone = min(length for _, length in inputs.spans if length) == 1  # one row has too few terms to average rounding
    assert err_out <= (1e-2 if lone else limit.out)


@pytest.mark.parametrize("v_first", [True, False], ids=["v_first", "k_first"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["s32", "s16"])
def test_every_form_reads_and_writes_every_pool(form: str, state_dtype: torch.dtype, v_first: bool) -> None:
    inputs = make_inputs(RAGGED, "slow", dtype=torch.bfloat16, device=DEVICE, seed=5, layout="fused", gaps=True)
    inputs.states = inputs.states.to(state_dtype).float()
    err_out, err_state = errors(inputs, *run(inputs, state_dtype, v_first))
    assert err_out <= 1e-2
    assert err_state <= bar("slow", torch.bfloat16, state_dtype).state


@pytest.mark.parametrize("regime", ["mixed", "unbounded"])
def test_2000_runs_of_a_ragged_batch_agree_to_the_bit(form: str, regime: str) -> None:
    shape = Shape("ragged_repeated", (700, 1, 0, 333, 64, 17, 1029, 5, 210), 4)
    inputs = make_inputs(shape, regime, dtype=torch.bfloat16, device=DEVICE, seed=6, layout="fused", gaps=True)
    first = run(inputs)
    differing = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(2000):
        for now, then in zip(run(inputs), first, strict=True):
            differing |= (now.view(torch.uint8) != then.view(torch.uint8)).any()
    assert not differing


# Corrections meet the state in fp16: magnitudes far outside its range, and steps of e^25 within a sequence.
@pytest.mark.parametrize(
    ("values", "keys", "states", "swing"),
    [
        (1e-6, 1.0, 1e-6, 0.0),
        (1e6, 1.0, 1e6, 0.0),
        (1e-20, 1.0, 1e-20, 0.0),
        (1e5, 1.0, 1.0, 0.0),
        (1.0, 1.0, 1e6, 0.0),
        (1.0, 1e-4, 1.0, 0.0),
        (1.0, 1e3, 1.0, 0.0),
        (1.0, 1.0, 1.0, 25.0),
    ],
)
def test_magnitudes_do_not_matter(form: str, values: float, keys: float, states: float, swing: float) -> None:
    inputs = make_inputs(Shape("scaled", (90, 77), 2), "slow", dtype=torch.bfloat16, device=DEVICE, seed=6)
    steps = torch.linspace(-swing, swing, inputs.v.shape[0], device=DEVICE).exp()[:, None, None]
    scaled = replace(
        inputs,
        v=(inputs.v.float() * values * steps).bfloat16(),
        k=(inputs.k.float() * keys).bfloat16(),
        states=inputs.states * states,
    )
    err_out, err_state = errors(scaled, *run(scaled))
    limit = bar("slow", torch.bfloat16)
    assert err_out <= limit.out
    assert err_state <= limit.state


@pytest.mark.parametrize("queries", [1e-4, 1.0, 1e4])
def test_queries_as_they_are(form: str, queries: float) -> None:
    """Nothing normalises them, and in parts they meet a transition before a state."""
    inputs = activated((150, 77), -0.01, dtype=torch.bfloat16, device=DEVICE, seed=5)
    inputs.q *= queries
    err_out, err_state = errors(inputs, *run(inputs))
    limit = bar("slow", torch.bfloat16)
    assert err_out <= limit.out
    assert err_state <= limit.state


# Unbounded gates, from hardly any decay to the clamp of a token within a chunk.
@pytest.mark.parametrize(("bias", "swing"), [(-8.0, 1.0), (3.0, 1.0), (0.0, 12.0)], ids=["weak", "strong", "both"])
@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32], ids=["g16", "g32"])
def test_gates_of_any_strength(form: str, g_dtype: torch.dtype, bias: float, swing: float) -> None:
    def adapt(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
        raw.A_log.copy_(torch.linspace(0.0, 3.0, shape.hv))
        raw.dt_bias.fill_(bias)
        raw.g *= swing

    inputs = make_inputs(
        RAGGED, Regime("gates", "", None, adapt), dtype=torch.bfloat16, device=DEVICE, seed=8, g_dtype=g_dtype
    )
    err_out, err_state = errors(inputs, *run(inputs))
    assert err_out <= 1e-2  # a sequence of one token among them
    assert err_state <= bar("slow", torch.bfloat16).state


# Corrections become tiny beside the state, which is scaled up for them.
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "unbounded"])
def test_one_token_repeated(form: str, lower_bound: float | None) -> None:
    def adapt(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
        raw.k = raw.k[:1].expand_as(raw.k).clone()
        raw.v = raw.v[:1].expand_as(raw.v).clone()
        raw.g.fill_(-14.0)
        raw.beta.fill_(2.0)

    regime = Regime("repeated", "", lower_bound, adapt)
    inputs = make_inputs(Shape("long", (512,), 2), regime, dtype=torch.bfloat16, device=DEVICE, seed=4)
    err_out, err_state = errors(inputs, *run(inputs))
    limit = bar("collinear", torch.bfloat16)
    assert err_out <= limit.out
    assert err_state <= limit.state


# Chunks with such writes carry low parts of every product.
@pytest.mark.parametrize("strength", [0.999, 0.9])
def test_a_strong_write_leaves_the_rest_of_the_state(form: str, strength: float) -> None:
    """One write of nothing, by the key of the one column that holds something: 1 - strength of that is left."""

    def adapt(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
        raw.q.zero_()[..., 3] = 1.0
        raw.k.copy_(raw.q)
        raw.v.zero_()
        raw.g.fill_(-60.0)
        raw.beta.fill_(logit(strength))
        raw.states = torch.zeros(1, shape.hv, 128, 128, device=raw.k.device)
        raw.states[..., 3] = 1.0

    regime = Regime("write", "", -5.0, adapt)
    inputs = make_inputs(Shape("one", (1,), 2), regime, dtype=torch.bfloat16, device=DEVICE, beta_dtype=torch.float32)
    inputs.scale = 1.0  # a scale that fp16 rounds would hide what is left
    out, final = run(inputs)
    want, state = inputs.expected()
    assert relative_error(out, want) < 1e-2
    assert relative_error(final, state) < 1e-2


@pytest.mark.parametrize("strength", [0.9, 0.9997])
@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "unbounded"])
def test_one_key_with_a_value_of_its_own_each_time(form: str, lower_bound: float | None, strength: float) -> None:
    """What a key's rounding does to the state, no read corrects: it adds up, and most where writes are strong."""

    def adapt(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
        raw.k.copy_(raw.k[:1].expand_as(raw.k).clone())
        raw.g.fill_(logit(1e-4 / 5) if lower_bound else math.log(1e-4))
        raw.beta.fill_(logit(strength))

    regime = Regime("one_key", "", lower_bound, adapt)
    inputs = make_inputs(
        Shape("long", (512,), 2), regime, dtype=torch.bfloat16, device=DEVICE, seed=4, beta_dtype=torch.float32
    )
    err_out, err_state = errors(inputs, *run(inputs))
    assert err_out <= bar("collinear", torch.bfloat16).out
    exact = strength > 0.99 and form != "parallel"  # transitions have no room for low parts of keys
    assert err_state <= (1.5e-3 if exact else bar("collinear", torch.bfloat16).state)


def test_no_token_depends_on_the_strength_of_a_later_write(form: str) -> None:
    inputs = make_inputs(
        Shape("t", (40,), 2), "slow", dtype=torch.bfloat16, device=DEVICE, seed=3, beta_dtype=torch.float32
    )
    before, _ = run(inputs)
    inputs.beta[9] = logit(0.999)
    after, _ = run(inputs)
    assert torch.equal(before[:9].view(torch.int16), after[:9].view(torch.int16))
    assert not torch.equal(before[9].view(torch.int16), after[9].view(torch.int16))


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "unbounded"])
def test_constant_slow_gates_keep_what_they_are(lower_bound: float | None) -> None:
    """Nothing is written, so the last state is the first one times the decays: an error of each chunk would add up."""
    tokens = 32768

    def adapt(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
        raw.g.fill_(-12.0)
        raw.beta.fill_(-60.0)

    inputs = make_inputs(
        Shape("long", (tokens,), 2), Regime("constant", "", lower_bound, adapt), dtype=torch.bfloat16, device=DEVICE
    )
    _, final = run(inputs)
    rate = -math.log1p(math.exp(-12.0)) if lower_bound is None else lower_bound / (1.0 + math.exp(12.0))
    assert relative_error(final, inputs.states.double() * math.exp(tokens * rate)) < 1e-3


@pytest.mark.parametrize(
    "checkpoints",
    [
        ((0, 16, 0), (0, 96, 1), (0, 160, 2), (1, 48, 3)),
        ((0, 96, 0), (0, 96, 1), (0, 112, 2), (1, 32, 3)),  # two of the same state
    ],
    ids=["chunks", "steps"],
)
def test_checkpoints_of_every_form_are_the_states_of_prefixes(
    form: str, checkpoints: tuple[tuple[int, int, int], ...]
) -> None:
    inputs = make_inputs(Shape("t", (160, 50), 2), "slow", dtype=torch.bfloat16, device=DEVICE, seed=7)
    table = Checkpoints.build(list(checkpoints), 2, DEVICE)
    exported = torch.full((4, *inputs.states.shape[1:]), float("nan"), device=DEVICE)
    pool, slots = inputs.states.clone(), torch.arange(2, device=DEVICE)
    ops.prefill(
        *inputs.operands(),
        **inputs.options(),
        segments=inputs.segments,
        state=pool,
        slots=slots,
        checkpoints=table,
        checkpoint_pool=exported,
        backend="cuda",
    )
    for segment, offset, slot in checkpoints:
        first = inputs.spans[segment][0]
        rows = slice(first, first + offset)
        cut = replace(
            inputs,
            **{name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "g", "beta")},
            segments=type(inputs.segments).from_lengths([offset], DEVICE),
            states=inputs.states[segment : segment + 1],
        )
        assert worst_state_error(exported[slot : slot + 1], cut.expected()[1]) <= bar("slow", torch.bfloat16).state


def test_unsorted_checkpoints_that_only_the_device_knows_harm_nothing(form: str) -> None:
    """The host refuses such a table where it sees it. Those behind the run may be missing; all else is as without."""
    inputs = make_inputs(Shape("t", (96, 64), 2), "slow", dtype=torch.bfloat16, device=DEVICE, seed=7)
    want, final = run(inputs)
    table = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 3, 3], [80, 16, 48], [0, 1, 2])]
    exported, pool = torch.zeros_like(inputs.states[:1]).repeat(4, 1, 1, 1), inputs.states.clone()
    rows = torch.full((160 + 96, *inputs.v.shape[1:]), 7.0, dtype=torch.bfloat16, device=DEVICE)
    ops.prefill(
        *inputs.operands(),
        **inputs.options(),
        segments=inputs.segments,
        state=pool,
        slots=torch.arange(2, device=DEVICE),
        checkpoints=Checkpoints(*table),
        checkpoint_pool=exported,
        out=rows[:160],
        backend="cuda",
    )
    assert torch.equal(rows[:160], want)
    assert bool((rows[160:] == 7.0).all())
    assert torch.equal(pool, final)


def test_a_cta_takes_one_head_after_another(form: str) -> None:
    """Many more heads and segments than multiprocessors; short, empty and padding ones among long ones."""
    lengths = tuple((97, 1, 0, 33, 16, 64, 200, 31)[n % 8] for n in range(40))
    inputs = make_inputs(
        Shape("many", lengths, 8), "slow", dtype=torch.bfloat16, device=DEVICE, seed=9, layout="fused", gaps=True
    )
    slots = torch.arange(40, device=DEVICE)
    padding = slots % 5 == 3
    slots[padding] = -1
    pool = inputs.states.clone()
    out = torch.full(inputs.v.shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)
    ops.prefill(
        *inputs.operands(),
        **inputs.options(),
        segments=inputs.segments,
        state=pool,
        slots=slots,
        pad_slot=-1,
        out=out,
        backend="cuda",
    )
    want, state = inputs.expected()
    limit = bar("slow", torch.bfloat16)
    for n, span in enumerate(inputs.spans):
        rows = slice(span[0], sum(span))
        if padding[n]:
            assert not out[rows].any()
            assert torch.equal(pool[n], inputs.states[n])
        else:
            assert worst_output_error(out, want, [span]) <= (1e-2 if span[1] == 1 else limit.out)
            assert worst_state_error(pool[n : n + 1], state[n : n + 1]) <= limit.state


def test_the_same_call_gives_the_same_bits(form: str) -> None:
    inputs = make_inputs(RAGGED, "unbounded", dtype=torch.bfloat16, device=DEVICE, seed=8, layout="fused", gaps=True)
    out, final = run(inputs)
    for _ in range(50):
        again, state = run(inputs)
        assert torch.equal(again.view(torch.int16), out.view(torch.int16))
        assert torch.equal(state, final)


def test_other_lengths_compile_nothing(form: str) -> None:
    run(make_inputs(RAGGED, "slow", dtype=torch.bfloat16, device=DEVICE))
    before = compiler.compile_count()
    for lengths in ((1,), (65, 3), (400,), (5,) * 70):
        run(make_inputs(Shape("t", lengths, 1), "slow", dtype=torch.bfloat16, device=DEVICE))
    assert compiler.compile_count() == before
