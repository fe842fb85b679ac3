"""Speculation and rollback, in both forms, as steps of a layer. Gates are weak, so that no fault fades unseen.

Each test stands for a kind of fault that serving stacks have met: wild accepted counts, leaving speculation for one
step, mixed rows, rejected drafts that stay, counts that follow a row instead of a request, overlapping shifts of the
convolution history, verification that restarts from zero, stale records.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable

import pytest
import torch
from torch import Tensor

from rapidkda import Segments, ops
from rapidkda.serving import KDALayer, Rollback, StepLimits, StepRequest
from rapidkda.testing.tolerances import relative_error

from .driver import Driver
from .oracle import TARGET, State, changed_slots, make_layer, only_on_torch, resting_state

FORMS: tuple[Rollback, ...] = ("replay", "slots")
OUT = TARGET.out
STATE = TARGET.state
SAME = OUT / 10  # two ways to the same result, which products of other shapes may round differently

pytestmark = pytest.mark.parametrize("rollback", FORMS)


def assert_rests_at(driver: Driver, name: Hashable, wanted: State) -> None:
    got = resting_state(driver.pool, driver.slots(name)[0])
    assert relative_error(got.recurrent, wanted.recurrent) <= STATE
    assert relative_error(got.history, wanted.history) <= STATE


@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_leaving_speculation_goes_on_from_the_accepted_token(rollback: Rollback, accepted: int) -> None:
    """Verify 4, accept some, one ordinary token, then a chunk of 3, then verify again."""
    driver = Driver(rollback=rollback)
    state = driver.prefill("a", driver.hidden(21))
    drafts = driver.hidden(4)
    driver.step(StepRequest("a", "verify", 4, driver.slots("a")), inputs={"a": drafts})
    state = driver.oracle.run(drafts, state)[1][accepted - 1]
    for kind, count, told in (("decode", 1, accepted), ("prefill", 3, 0), ("verify", 2, 0)):
        hidden = driver.hidden(count)
        record = StepRequest("a", kind, count, driver.slots("a"), accepted=told)  # type: ignore[arg-type]
        got = driver.step(record, inputs={"a": hidden})["a"]
        wanted, states = driver.oracle.run(hidden, state)
        state = states[-1]
        assert relative_error(got, wanted) <= OUT
        if kind != "verify":
            assert_rests_at(driver, "a", state)


@pytest.mark.parametrize("accepted", [1, 3, 4])
@pytest.mark.parametrize("following", ["prefill", "decode", "verify"])
def test_one_kind_after_another(rollback: Rollback, accepted: int, following: str) -> None:
    driver = Driver(rollback=rollback)
    state = driver.prefill("a", driver.hidden(9))
    for _ in range(3):
        drafts = driver.hidden(4)
        told = 0 if driver.pool.slots is None else driver.pool.slots.open_drafts("a") and accepted
        driver.step(StepRequest("a", "verify", 4, driver.slots("a"), accepted=told), inputs={"a": drafts})
        state = driver.oracle.run(drafts, state)[1][accepted - 1]
    count = {"prefill": 17, "decode": 1, "verify": 2}[following]
    hidden = driver.hidden(count)
    record = StepRequest("a", following, count, driver.slots("a"), accepted=accepted)  # type: ignore[arg-type]
    assert relative_error(driver.step(record, inputs={"a": hidden})["a"], driver.oracle.run(hidden, state)[0]) <= OUT


def test_wild_accepted_counts_on_the_device_stay_in_their_request(rollback: Rollback) -> None:
    """0, T, T + 1 and nonsense reach the kernels: nothing outside the request's own slots is read or written."""
    driver = Driver(rollback=rollback)
    names = ["a", "b", "c", "d", "e"]
    states = {name: driver.prefill(name, driver.hidden(6)) for name in names}
    drafts = {name: driver.hidden(4) for name in names}
    driver.step(*(StepRequest(n, "verify", 4, driver.slots(n)) for n in names), inputs=drafts)
    hidden = driver.hidden(10)
    records = [StepRequest(name, "verify", 2, driver.slots(name), accepted=1) for name in names]
    driver.batch.fill(records)
    assert driver.batch.verify is not None
    driver.batch.verify.accepted.copy_(torch.tensor([0, 4, 5, 1, 2**31 - 1]))
    kept = driver.pool.layers[0].records
    if kept is not None:
        kept[:, 4:] = 0.0  # of no token: folded in, they change nothing
    before = driver.snapshot()
    out = driver.layer(hidden, driver.batch, driver.pool, driver.workspace)
    assert changed_slots(driver.pool, before) <= {slot for name in names for slot in driver.slots(name)}
    assert torch.isfinite(out).all()
    for index, name, accepted in ((1, "b", 4), (2, "c", 4), (3, "d", 1), (4, "e", 4)):  # clamped
        start = driver.oracle.run(drafts[name], states[name])[1][accepted - 1]
        rows = slice(2 * index, 2 * index + 2)
        assert relative_error(out[rows], driver.oracle.run(hidden[rows], start)[0]) <= OUT


def mixed_step(driver: Driver) -> tuple[list[StepRequest], dict[Hashable, Tensor]]:
    """Prefill 65, continued prefill 1, decode 1, verify 4, padding, in an order that is sorted by nothing."""
    for name in ("more", "one", "drafts"):
        driver.prefill(name, driver.hidden(7))
    new = driver.pool.allocate("new")
    records = [
        StepRequest("one", "decode", 1, driver.slots("one")),
        StepRequest("drafts", "verify", 4, driver.slots("drafts")),
        StepRequest.padding(3),
        StepRequest("new", "prefill", 65, new, has_initial_state=False),
        StepRequest("more", "prefill", 1, driver.slots("more")),
        StepRequest.padding(2),
    ]
    inputs: dict[Hashable, Tensor] = {r.request_id: driver.hidden(r.num_tokens) for r in records if r.slots}
    return records, inputs


def test_one_mixed_call_equals_separate_calls(rollback: Rollback) -> None:
    together, apart = Driver(rollback=rollback), Driver(rollback=rollback)
    records, inputs = mixed_step(together)
    same, _ = mixed_step(apart)
    got = together.step(*records, inputs=inputs)
    for record in same:
        if record.slots:
            alone = apart.step(record, inputs=inputs)[record.request_id]
            assert relative_error(got[record.request_id], alone) <= SAME
    for name in ("new", "more", "one"):
        left, right = (resting_state(d.pool, d.slots(name)[0]) for d in (together, apart))
        assert relative_error(left.recurrent, right.recurrent) <= SAME
        assert torch.equal(left.history, right.history) or relative_error(left.history, right.history) <= SAME


def test_the_order_of_rows_does_not_matter(rollback: Rollback) -> None:
    outputs = []
    for order in ([0, 1, 2, 3, 4, 5], [4, 3, 0, 5, 1, 2], [1, 5, 2, 4, 0, 3]):
        driver = Driver(rollback=rollback)
        records, inputs = mixed_step(driver)
        outputs.append(driver.step(*(records[i] for i in order), inputs=inputs))
    for other in outputs[1:]:
        for name, value in outputs[0].items():
            assert relative_error(other[name], value) <= SAME


def test_the_same_step_twice_gives_the_same_bits(rollback: Rollback) -> None:
    results = []
    for _ in range(2):
        driver = Driver(rollback=rollback)
        records, inputs = mixed_step(driver)
        results.append((driver.step(*records, inputs=inputs), driver.snapshot()))
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in results[0][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_a_request_with_nan_leaves_its_batch_mates_alone(rollback: Rollback) -> None:
    results = []
    for poisoned in (False, True):
        driver = Driver(rollback=rollback)
        records, inputs = mixed_step(driver)
        if poisoned:
            inputs["drafts"] = torch.full_like(inputs["drafts"], float("nan"))
            inputs["more"] = torch.full_like(inputs["more"], float("nan"))
        results.append(driver.step(*records, inputs=inputs))
    for name in ("new", "one"):
        assert torch.equal(results[0][name], results[1][name])
    assert results[1]["drafts"].isnan().any()


@pytest.mark.parametrize("drafts", [8, 64])
def test_rejected_drafts_never_reach_the_committed_state(rollback: Rollback, drafts: int) -> None:
    driver = Driver(rollback=rollback, max_drafts=63, slots=70, limits=StepLimits(128, 2))
    state = driver.prefill("a", driver.hidden(10))
    hidden = driver.hidden(drafts)
    before = [layer.recurrent[driver.slots("a")[0]].clone() for layer in driver.pool.layers]
    got = driver.step(StepRequest("a", "verify", drafts, driver.slots("a")), inputs={"a": hidden})["a"]
    wanted, states = driver.oracle.run(hidden, state)
    assert relative_error(got, wanted) <= OUT
    if rollback == "replay":
        assert torch.equal(driver.pool.layers[0].recurrent[driver.slots("a")[0]], before[0])
    driver.settle("a", 1)
    assert_rests_at(driver, "a", states[0])


def test_counts_follow_the_request_and_not_its_row(rollback: Rollback) -> None:
    """Three requests verify; one leaves; the others come back in another order: each sees its own count."""
    driver = Driver(rollback=rollback)
    names, accepted = ["x", "y", "z"], {"x": 1, "y": 4, "z": 2}
    states = {name: driver.prefill(name, driver.hidden(5)) for name in names}
    drafts = {name: driver.hidden(4) for name in names}
    driver.step(*(StepRequest(n, "verify", 4, driver.slots(n)) for n in names), inputs=drafts)
    driver.pool.free("x")
    assert driver.pool.slots is not None
    assert driver.pool.slots.open_drafts("x") == 0
    hidden = {name: driver.hidden(2) for name in ("z", "y")}
    records = [StepRequest(n, "verify", 2, driver.slots(n), accepted=accepted[n]) for n in ("z", "y")]
    got = driver.step(*records, inputs=hidden)
    assert driver.batch.verify is not None
    assert driver.batch.verify.accepted.tolist() == [2, 4]
    for name in ("z", "y"):
        start = driver.oracle.run(drafts[name], states[name])[1][accepted[name] - 1]
        assert relative_error(got[name], driver.oracle.run(hidden[name], start)[0]) <= OUT


def test_three_tokens_after_a_prompt_equal_three_decodes(rollback: Rollback) -> None:
    hidden = None
    outputs = []
    for kinds in (["prefill 3"], ["verify 3"], ["decode 1"] * 3, ["verify 1", "decode 1", "verify 1"]):
        driver = Driver(rollback=rollback)
        driver.prefill("a", driver.hidden(50))
        hidden = driver.hidden(3)
        parts, start, told = [], 0, 0
        for kind, count in (step.split() for step in kinds):
            rows = hidden[start : start + int(count)]
            record = StepRequest("a", kind, int(count), driver.slots("a"), accepted=told)  # type: ignore[arg-type]
            parts.append(driver.step(record, inputs={"a": rows})["a"])
            start, told = start + int(count), int(count) if kind == "verify" else 0
        outputs.append(torch.cat(parts))
    assert all(relative_error(other, outputs[0]) <= OUT for other in outputs[1:])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_stale_entries_past_the_accepted_ones_are_never_read(rollback: Rollback, poison: float) -> None:
    driver = Driver(rollback=rollback)
    state = driver.prefill("a", driver.hidden(6))
    drafts = driver.hidden(4)
    driver.step(StepRequest("a", "verify", 4, driver.slots("a")), inputs={"a": drafts})
    slots, layer = driver.slots("a"), driver.pool.layers[0]
    if layer.records is not None:
        layer.records[slots[0], 2:] = poison
    else:
        layer.recurrent[list(slots[2:])] = poison
    layer.conv[slots[0], 2 + 2 :] = poison  # W - 1 = 3 entries from entry accepted - 1 = 1 are live
    driver.settle("a", 2)
    assert_rests_at(driver, "a", driver.oracle.run(drafts, state)[1][1])


def test_ragged_drafts_in_one_step(rollback: Rollback) -> None:
    driver = Driver(rollback=rollback)
    generator = random.Random(5)
    names = [f"r{i}" for i in range(6)]
    states = {name: driver.prefill(name, driver.hidden(4)) for name in names}
    told = dict.fromkeys(names, 0)
    for _ in range(12):
        counts = {name: generator.randint(1, 4) for name in names}
        order = generator.sample(names, len(names))
        inputs: dict[Hashable, Tensor] = {name: driver.hidden(counts[name]) for name in names}
        records = [StepRequest(n, "verify", counts[n], driver.slots(n), accepted=told[n]) for n in order]
        got = driver.step(*records, inputs=inputs)
        for name in names:
            wanted, after = driver.oracle.run(inputs[name], states[name])
            assert relative_error(got[name], wanted) <= OUT
            told[name] = generator.randint(1, counts[name])
            states[name] = after[told[name] - 1]


def test_history_shifts_like_memmove_however_often(rollback: Rollback) -> None:
    """Reading from entry accepted - 1 and writing from entry 0 of the same slot overlap, over thousands of channels."""
    channels, width, drafts, device = 6144, 4, 7, TARGET.device
    weight = torch.zeros(channels, width, device=device)
    weight[:, 0] = 1.0  # the output is the oldest of the four inputs
    columns = torch.arange(width - 1 + drafts, dtype=torch.float32, device=device)
    keep_all = rollback == "slots"  # as a verification, or as a decode
    for run, accepted in itertools.product(range(30), (2, 3, 4, 6)):
        pool = columns.repeat(3, channels, 1).transpose(1, 2).contiguous()
        slot = run % 3
        out = ops.causal_conv(
            torch.full((1, channels), 100.0, device=device),
            weight,
            segments=Segments.from_lengths([1], device),
            state=pool,
            slots=torch.tensor([slot], device=device),
            accepted=torch.tensor([accepted], device=device),
            keep_all=keep_all,
            activation=None,
            channels_last=True,
            backend=TARGET.backend,
        )
        assert (out == accepted - 1).all()
        expected = columns.clone()
        expected[:3] = torch.tensor([accepted, accepted + 1, 100.0], device=device)
        assert torch.equal(pool[slot], expected.unsqueeze(1).expand(-1, channels))


class ToyModel:
    """Embedding, one layer, and logits: enough for greedy decoding to depend on every accepted token."""

    def __init__(self, layer: KDALayer, vocabulary: int = 29):
        generator = torch.Generator().manual_seed(3)
        self.embedding = torch.randn(vocabulary, layer.hidden_size, generator=generator)
        self.head = torch.randn(layer.hidden_size, vocabulary, generator=generator)

    def tokens(self, hidden: Tensor, out: Tensor) -> list[int]:
        """The greedy next token after each row."""
        result: list[int] = ((hidden + 4.0 * out) @ self.head).argmax(-1).tolist()
        return result


def greedy(rollback: Rollback, count: int, drafter: random.Random | None) -> list[int]:
    """Generate; with a drafter, verify its guesses (right ones and wrong ones at random), else decode."""
    driver = Driver(make_layer(11), rollback=rollback)
    model = ToyModel(driver.layer)
    prompt = [1, 5, 2, 8, 3]
    truth = greedy(rollback, count + 4, None) if drafter is not None else []
    hidden = model.embedding[prompt]
    slots = driver.pool.allocate("a")
    out = driver.step(StepRequest("a", "prefill", 5, slots, has_initial_state=False), inputs={"a": hidden})["a"]
    stream = [model.tokens(hidden, out)[-1]]
    told = 0
    while len(stream) < count:
        guesses: list[int] = []
        if drafter is not None:
            ahead = truth[len(stream) : len(stream) + drafter.randint(0, 3)]
            guesses = [token if drafter.random() < 0.7 else (token + 1) % 29 for token in ahead]
        fed = [stream[-1], *guesses]
        hidden = model.embedding[fed]
        if (drafter is not None and drafter.random() < 0.9) or len(fed) > 1:
            record = StepRequest("a", "verify", len(fed), slots, accepted=told)
        else:
            record = StepRequest("a", "decode", 1, slots, accepted=told)
        after = model.tokens(hidden, driver.step(record, inputs={"a": hidden})["a"])
        right = next((i for i, guess in enumerate(guesses) if guess != after[i]), len(guesses))
        stream += [*guesses[:right], after[right]]
        told = right + 1 if record.kind == "verify" else 0
    return stream[:count]


@only_on_torch  # elsewhere bfloat16 rounds near-ties apart
def test_greedy_tokens_do_not_depend_on_speculation(rollback: Rollback) -> None:
    plain = greedy(rollback, 200, None)
    assert len(set(plain)) > 5  # a stream that could show a difference
    for seed in range(3):
        assert greedy(rollback, 200, random.Random(seed)) == plain


def test_settling_nothing_leaves_the_state_bit_unchanged(rollback: Rollback) -> None:
    driver = Driver(rollback=rollback)
    driver.prefill("a", driver.hidden(6))
    before = driver.snapshot()
    driver.settle("a", 0)
    state = driver.pool.layers[0]
    if state.records is not None:
        slots, accepted = (torch.tensor(v, device=TARGET.device) for v in (driver.slots("a"), [0]))
        records = {"records": state.records, "held": state.held}
        ops.commit(state=state.recurrent, **records, slots=slots, accepted=accepted, backend=TARGET.backend)
    assert not changed_slots(driver.pool, before)
