"""Many requests at once: each as if alone, whoever comes, waits, leaves, fails or is put back."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rapidkda.engine import Engine, EngineConfig, Request, RequestResult, SamplingParams, TokenEvent

from .support import Knowing, Prompt, assert_empty, greedy_margins, plain, random_prompts

REQUESTS = 64
NAN_TOKEN = 255
DECIDED = 1e-3  # see test_speculation


@pytest.fixture(scope="module")
def crowd(models: dict[str, Any]) -> dict[str, dict[Prompt, tuple[int, ...]]]:
    """For each family, 64 prompts of mixed lengths, each run alone, with outputs of mixed lengths."""
    found = {}
    for name, model in models.items():
        prompts = random_prompts(REQUESTS + 32, seed=11, longest=50)
        judged = greedy_margins(model, plain(model, prompts, 12))
        decided = [prompt for prompt in prompts if judged[prompt][1] > DECIDED][:REQUESTS]
        assert len(decided) == REQUESTS
        engine = Engine(model, EngineConfig(max_num_batched_tokens=64, max_num_seqs=1))
        found[name] = {
            prompt: engine.generate([prompt], SamplingParams(max_new_tokens=1 + index % 12))[0].tokens
            for index, prompt in enumerate(decided)
        }
    return found


def add_all(engine: Engine, crowd: dict[Prompt, tuple[int, ...]]) -> list[Any]:
    return [engine.add_request(prompt, SamplingParams(max_new_tokens=len(want))) for prompt, want in crowd.items()]


def finish(engine: Engine) -> None:
    while engine.unfinished:
        engine.step()


CONFIGS = {
    "plain": EngineConfig(max_num_batched_tokens=96, max_num_seqs=64, prefill_chunk=32),
    "few slots": EngineConfig(max_num_batched_tokens=64, max_num_seqs=32, num_slots=5),
    "replay": EngineConfig(max_num_batched_tokens=128, max_num_seqs=64, max_drafts=3),
    "slots": EngineConfig(max_num_batched_tokens=128, max_num_seqs=64, num_slots=41, max_drafts=3, rollback="slots"),
    "little cache": EngineConfig(max_num_batched_tokens=64, max_num_seqs=16, max_cached_tokens=100, max_drafts=2),
    "deferred decodes": EngineConfig(max_num_batched_tokens=96, max_num_seqs=64, prefill_chunk=32, record_rows=4),
    "deferred decodes, little cache": EngineConfig(
        max_num_batched_tokens=64, max_num_seqs=16, max_cached_tokens=100, record_rows=3
    ),
}


@pytest.mark.parametrize("family", ["glm5_next", "kimi_linear"])
@pytest.mark.parametrize("name", CONFIGS)
def test_concurrent_requests_finish_each_as_alone(
    models: dict[str, Any], crowd: dict[str, dict[Prompt, tuple[int, ...]]], family: str, name: str
) -> None:
    want = crowd[family]
    engine = Engine(models[family], CONFIGS[name], Knowing(want, seed=1))
    names = add_all(engine, want)
    finish(engine)
    results = [engine.take_result(name) for name in names]
    assert [result.tokens for result in results] == list(want.values())
    assert_empty(engine)
    preempted = sum(result.stats.preemptions for result in results)
    assert (preempted > 0) == ("little cache" in name)


@pytest.mark.parametrize("name", CONFIGS)
def test_cancelling_half_midway_leaks_nothing_and_changes_nothing(
    kimi: Any, crowd: dict[str, dict[Prompt, tuple[int, ...]]], name: str
) -> None:
    want = crowd["kimi_linear"]
    engine = Engine(kimi, CONFIGS[name], Knowing(want, seed=3))
    names = add_all(engine, want)
    rng = random.Random(0)
    doomed = set(rng.sample(names, REQUESTS // 2))
    left = sorted(doomed)
    stages: set[str] = set()
    while engine.unfinished:
        engine.step()
        for _ in range(1 if "little cache" in name else 3):  # few run there, and most would still be queued
            if left:
                running = [one for one in left if one in engine._requests and engine._requests[one].slots]
                victim = rng.choice(running if running and rng.random() < 0.5 else left)
                left.remove(victim)
                request = engine._requests.get(victim)
                if request is not None:
                    stages.add("queued" if not request.slots else "decoding" if request.decoding else "prefilling")
                    stages.add("with open drafts" if request.accepted else "without")
                if engine.abort(victim):
                    assert not engine.abort(victim)
                else:
                    doomed.discard(victim)  # it was faster
    assert len(doomed) > 20
    assert {"queued", "decoding"} <= stages
    assert ("with open drafts" in stages) == engine.config.verifies
    assert_empty(engine)
    for one, tokens in zip(names, want.values(), strict=True):
        result = engine.take_result(one)
        if one in doomed:
            assert result.finish_reason == "aborted"
            assert result.tokens == tokens[: len(result.tokens)]
        else:
            assert result.tokens == tokens
    prompt, tokens = next(iter(want.items()))
    again = engine.generate([prompt], SamplingParams(max_new_tokens=len(tokens)))[0]
    assert again.tokens == tokens


def test_cancelling_in_the_middle_of_a_prompt(kimi: Any) -> None:
    prompts = random_prompts(2, seed=5, shortest=40, longest=40)
    want = plain(kimi, prompts, 4)
    engine = Engine(kimi, EngineConfig(max_num_batched_tokens=16, max_num_seqs=2))
    first, second = (engine.add_request(prompt, SamplingParams(max_new_tokens=4)) for prompt in prompts)
    engine.step()
    assert 0 < engine.computed_tokens(first) < 40
    assert engine.abort(first)
    assert engine.free_slots == 2
    finish(engine)
    assert engine.take_result(second).tokens == want[prompts[1]]
    assert_empty(engine)


def test_a_full_pool_makes_requests_wait_in_order(kimi: Any) -> None:
    engine = Engine(kimi, EngineConfig(max_num_batched_tokens=64, max_num_seqs=8, num_slots=2))
    order: list[Any] = []

    def watch(event: TokenEvent) -> None:
        if event.index == 0:
            order.append(event.request_id)

    prompts = random_prompts(7, seed=6)
    names = [engine.add_request(prompt, SamplingParams(max_new_tokens=3), on_token=watch) for prompt in prompts]
    engine.step()
    assert engine.free_slots == 0
    assert engine.unfinished == 7
    finish(engine)
    assert order == names
    assert all(engine.take_result(name).finish_reason == "length" for name in names)


def test_steps_mix_prefill_and_verification_within_the_budget(kimi: Any) -> None:
    prompts = random_prompts(12, seed=8, shortest=20, longest=60)
    truth = plain(kimi, prompts, 12)
    config = EngineConfig(max_num_batched_tokens=24, max_num_seqs=4, max_drafts=3)
    engine = Engine(kimi, config, Knowing(truth, seed=0))
    names = [engine.add_request(prompt, SamplingParams(max_new_tokens=12)) for prompt in prompts]
    mixed = full = 0
    while engine.unfinished:
        engine.step()
        plan = engine._batch.plan
        assert plan is not None
        assert plan.num_tokens <= 24
        assert not plan.padding
        full += plan.num_tokens == 24
        drafts = sum(row.length - 1 for row in plan.rows["verify"])
        mixed += bool(plan.rows["prefill"]) and drafts > 0
    assert mixed > 3
    assert full > 3
    assert [engine.take_result(name).tokens for name in names] == list(truth.values())


def test_deferred_decodes_are_verifications_of_one_token_beside_prompts(kimi: Any) -> None:
    prompts = random_prompts(12, seed=8, shortest=20, longest=60)
    truth = plain(kimi, prompts, 12)
    engine = Engine(kimi, EngineConfig(max_num_batched_tokens=24, max_num_seqs=4, record_rows=5))
    names = [engine.add_request(prompt, SamplingParams(max_new_tokens=12)) for prompt in prompts]
    mixed = 0
    while engine.unfinished:
        engine.step()
        plan = engine._batch.plan
        assert plan is not None
        assert not plan.rows["decode"]
        assert {row.length for row in plan.rows["verify"]} <= {1}
        mixed += bool(plan.rows["prefill"]) and bool(plan.rows["verify"])
    assert mixed > 3
    results = [engine.take_result(name) for name in names]
    assert [result.tokens for result in results] == list(truth.values())
    assert all(result.stats.acceptance_rate is None for result in results)
    assert_empty(engine)


def broken(model: Any) -> Any:
    """The model with an embedding of NaN for one token, which its head never picks."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[NAN_TOKEN] = torch.nan
        model.lm_head.weight[NAN_TOKEN] = 0
    return model


@pytest.mark.parametrize(
    "form", [{"max_drafts": 2}, {"max_drafts": 2, "rollback": "slots"}, {"record_rows": 3}], ids=str
)
def test_not_a_number_ends_its_own_request_only(model: Any, form: dict[str, Any]) -> None:
    model = broken(model)
    good = random_prompts(10, seed=12, longest=30)
    want = plain(model, good, 6)
    bad = [(*prompt[: len(prompt) // 2], NAN_TOKEN, *prompt[len(prompt) // 2 :]) for prompt in good]
    config = EngineConfig(max_num_batched_tokens=48, max_num_seqs=6, **form)
    engine = Engine(model, config, Knowing({**want, **dict.fromkeys(bad, ())}, seed=0))
    both = [prompt for pair in zip(good, bad) for prompt in pair]
    results = engine.generate(both, SamplingParams(max_new_tokens=6))
    assert_empty(engine)
    for result in results:
        if NAN_TOKEN in result.prompt:
            assert (result.finish_reason, result.tokens) == ("error", ())
            assert result.error == "logits are not finite"
        else:
            assert result.tokens == want[result.prompt]


class Poison(Knowing):
    """Proposes the token whose embedding is not a number."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return [[NAN_TOKEN] * count for _, count in wanted]


@pytest.mark.parametrize("rollback", ["replay", "slots"])
def test_a_rejected_draft_that_is_not_a_number_leaves_nothing(model: Any, rollback: Any) -> None:
    model = broken(model)
    prompts = random_prompts(6, seed=13)
    want = plain(model, prompts, 6)
    config = EngineConfig(max_num_batched_tokens=48, max_num_seqs=6, max_drafts=3, rollback=rollback)
    results = Engine(model, config, Poison(want, seed=0)).generate(prompts, SamplingParams(max_new_tokens=6))
    assert {result.prompt: result.tokens for result in results} == want
    assert [result.stats.preemptions for result in results] == [1] * 6  # computed again once, then without drafts


def test_an_exception_in_a_step_ends_its_requests_and_no_others(kimi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts(4, seed=14)
    want = plain(kimi, prompts, 4)
    engine = Engine(kimi, EngineConfig(max_num_batched_tokens=64, max_num_seqs=2))
    names = [engine.add_request(prompt, SamplingParams(max_new_tokens=4)) for prompt in prompts]
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(MemoryError):
            engine.step()
    finish(engine)
    results = [engine.take_result(name) for name in names]
    assert [(result.finish_reason, result.error) for result in results[:2]] == [("error", "MemoryError: no memory")] * 2
    assert [result.tokens for result in results[2:]] == [want[prompt] for prompt in prompts[2:]]
    assert_empty(engine)


@pytest.mark.parametrize("call", ["propose", "observe"])
def test_a_drafter_that_raises_ends_the_requests_it_was_asked_for(
    kimi: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    first, second = random_prompts(2, seed=15)
    engine = Engine(kimi, EngineConfig(max_drafts=2), Knowing({}, seed=0))
    monkeypatch.setattr(Knowing, "propose", lambda self, wanted: [[] for _ in wanted])
    name = engine.add_request(first, SamplingParams(max_new_tokens=4))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Knowing, call, lambda *_: (_ for _ in ()).throw(ArithmeticError("no idea")))
        with pytest.raises(ArithmeticError):
            engine.step()
    assert engine.take_result(name).error == "ArithmeticError: no idea"
    assert_empty(engine)
    want = plain(kimi, [second], 4)
    assert engine.generate([second], SamplingParams(max_new_tokens=4))[0].tokens == want[second]


def test_generate_leaves_nothing_behind_when_it_fails(kimi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(kimi, EngineConfig(max_num_batched_tokens=64, max_num_seqs=2))
    with pytest.raises(ValueError, match="prompt must hold at least one token"):
        engine.generate([[1, 2], [3], []])
    assert_empty(engine)
    monkeypatch.setattr(engine.model, "forward", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
    with pytest.raises(MemoryError):
        engine.generate([[1, 2], [3], [4]])
    assert_empty(engine)
    for name in range(6):
        with pytest.raises(ValueError, match="is unknown"):
            engine.take_result(name)


def test_a_number_of_the_callers_own_is_not_given_again(kimi: Any) -> None:
    engine = Engine(kimi)
    engine.add_request([1, 2], SamplingParams(max_new_tokens=1), request_id=0)
    finish(engine)
    engine.generate([[3, 4]])
    assert engine.take_result(0).prompt == (1, 2)


def test_a_callback_that_raises_keeps_no_other_from_its_tokens(kimi: Any) -> None:
    prompts = random_prompts(2, seed=16)
    want = plain(kimi, prompts, 3)
    engine = Engine(kimi)
    heard: list[TokenEvent] = []

    def fail(event: TokenEvent) -> None:
        raise LookupError(f"token {event.index}")

    params = SamplingParams(max_new_tokens=3)
    engine.add_request(prompts[0], params, on_token=fail)
    engine.add_request(prompts[1], params, on_token=heard.append)
    for index in range(3):
        with pytest.raises(LookupError, match=f"token {index}"):
            engine.step()
    assert tuple(event.token for event in heard) == want[prompts[1]]
    assert_empty(engine)


def test_streaming_gives_every_token_as_it_comes(kimi: Any) -> None:
    prompts = random_prompts(3, seed=15)
    want = plain(kimi, prompts, 6)
    engine = Engine(kimi, EngineConfig(max_drafts=2), Knowing(want, seed=0))
    other = engine.add_request(prompts[1], SamplingParams(max_new_tokens=6))
    events = list(engine.stream(prompts[0], SamplingParams(max_new_tokens=6)))
    assert tuple(event.token for event in events) == want[prompts[0]]
    assert [event.index for event in events] == list(range(6))
    assert [event.finish_reason for event in events] == [None] * 5 + ["length"]
    finish(engine)
    assert engine.take_result(other).tokens == want[prompts[1]]
    stream = engine.stream(prompts[2], SamplingParams(max_new_tokens=6))
    next(stream)
    assert isinstance(stream, Iterator)
    stream.close()  # type: ignore[attr-defined]
    assert_empty(engine)


def test_callbacks_may_cancel_and_add(kimi: Any) -> None:
    prompts = random_prompts(3, seed=16)
    want = plain(kimi, prompts, 6)
    engine = Engine(kimi, EngineConfig())
    added: list[Any] = []
    heard: list[TokenEvent] = []

    def on_token(event: TokenEvent) -> None:
        heard.append(event)
        if event.index == 1 and event.token is not None:
            engine.abort(second)
            engine.abort(first)
            added.append(engine.add_request(prompts[2], SamplingParams(max_new_tokens=6)))

    first = engine.add_request(prompts[0], SamplingParams(max_new_tokens=6), on_token=on_token)
    second = engine.add_request(prompts[1], SamplingParams(max_new_tokens=6))
    finish(engine)
    assert engine.take_result(first).tokens == want[prompts[0]][:2]
    assert [event.finish_reason for event in heard] == [None, None, "aborted"]
    assert engine.take_result(second).finish_reason == "aborted"
    assert engine.take_result(added[0]).tokens == want[prompts[2]]
    assert_empty(engine)


def test_a_callback_that_cancels_hears_nothing_more_of_the_same_step(kimi: Any) -> None:
    prompt = random_prompts(1, seed=16)[0]
    want = plain(kimi, [prompt], 8)
    engine = Engine(kimi, EngineConfig(max_drafts=3), Knowing(want, seed=5, right=1.0))
    heard: list[TokenEvent] = []

    def on_token(event: TokenEvent) -> None:
        heard.append(event)
        if event.index == 2 and event.token is not None:
            engine.abort(name)

    name = engine.add_request(prompt, SamplingParams(max_new_tokens=8), on_token=on_token)
    returned = []
    while engine.unfinished:
        returned += engine.step()
    assert [event.token for event in heard] == [*want[prompt][:3], None]
    assert heard[-1].finish_reason == "aborted"
    assert returned == heard[:-1]
    assert engine.take_result(name).stats.accepted > 0
    assert_empty(engine)


def test_stop_tokens_end_a_request_even_among_accepted_drafts(kimi: Any) -> None:
    prompt = random_prompts(1, seed=17)[0]
    want = plain(kimi, [prompt], 10)
    tokens = want[prompt]
    place = next(i for i in range(2, 10) if tokens[i] not in tokens[:i])
    for drafts in (0, 7):
        engine = Engine(kimi, EngineConfig(max_drafts=drafts), Knowing(want, seed=0, right=1.0))
        params = SamplingParams(max_new_tokens=10, stop_ids=(tokens[place],))
        result = engine.generate([prompt], params)[0]
        assert result.finish_reason == "stop"
        assert result.tokens == tokens[: place + 1]
        assert_empty(engine)


def test_statistics(kimi: Any) -> None:
    prompt = random_prompts(1, seed=18, shortest=20)[0]
    want = plain(kimi, [prompt], 9)
    engine = Engine(kimi, EngineConfig(max_drafts=3), Knowing(want, seed=0, right=1.0))
    result: RequestResult = engine.generate([prompt], SamplingParams(max_new_tokens=9))[0]
    stats = result.stats
    assert (stats.prompt_tokens, stats.output_tokens) == (len(prompt), 9)
    assert stats.acceptance_rate == 1.0
    assert stats.steps < 9 + stats.accepted
    assert stats.output_tokens == stats.steps + stats.accepted
    assert stats.ttft is not None
    assert stats.time_per_output_token is not None
    assert 0 < stats.ttft < 60
    assert stats.finished is not None
    assert stats.ttft + 8 * stats.time_per_output_token == pytest.approx(stats.finished - stats.added)
    one = engine.generate([prompt], SamplingParams(max_new_tokens=1))[0].stats
    assert one.time_per_output_token is None
    assert one.acceptance_rate is None


@pytest.mark.parametrize(
    "form", [{}, {"max_drafts": 3}, {"max_drafts": 3, "rollback": "slots"}, {"record_rows": 4}], ids=str
)
def test_memory_is_as_planned_and_attention_caches_grow_and_go(model: Any, form: dict[str, Any]) -> None:
    engine = Engine(model, EngineConfig(max_num_batched_tokens=128, **form))
    memory = engine.memory()
    assert engine.planned_bytes == {"states": memory.states, "workspace": memory.workspace}
    assert memory.attention == 0
    name = engine.add_request(random_prompts(1, seed=0, shortest=20)[0], SamplingParams(max_new_tokens=8))
    engine.step()
    grown = engine.memory()
    assert grown.attention > 0
    assert grown.total == memory.total + grown.attention
    engine.abort(name)
    assert engine.memory() == memory


def test_requests_that_cannot_ever_run_are_refused_with_both_numbers(kimi: Any) -> None:
    engine = Engine(kimi, EngineConfig(max_model_len=40, max_cached_tokens=30))
    small = SamplingParams(max_new_tokens=4)
    refusals = [
        (([], small), ValueError, "prompt must hold at least one token"),
        (([256], small), ValueError, "prompt must hold token ids below 256, got 256"),
        (([-1], small), ValueError, "prompt must be at least 0, got -1"),
        ((["a"], small), TypeError, "prompt must be an int"),
        (([1] * 38, small), ValueError, r"fit max_model_len = 40, got 38 \+ 4 = 42 tokens"),
        (([1] * 28, small), ValueError, r"fit max_cached_tokens = 30, got 28 \+ 4 = 32 tokens"),
        (([1], "greedy"), TypeError, "params must be SamplingParams, got str"),
    ]
    for (prompt, params), kind, message in refusals:
        with pytest.raises(kind, match=message):
            engine.add_request(prompt, params)  # type: ignore[arg-type]
    engine.add_request([1], small, request_id="a")
    with pytest.raises(ValueError, match=r"request_id must not be in use, .*got 'a'"):
        engine.add_request([1], small, request_id="a")
    with pytest.raises(ValueError, match="request_id must be that of an ended request, got 'a', which has not ended"):
        engine.take_result("a")
    with pytest.raises(ValueError, match="got 'b', which is unknown"):
        engine.take_result("b")
    with pytest.raises(ValueError, match="params must be one for all or one for each of 2 prompts, got 1"):
        engine.generate([[1], [2]], [small])
    assert engine.unfinished == 1
    engine.abort("a")
    with pytest.raises(ValueError, match="nor that of a result not yet taken, got 'a'"):
        engine.add_request([1], small, request_id="a")
    engine.take_result("a")
    assert not engine.abort("b")


def test_records_that_defer_nothing_are_refused(kimi: Any) -> None:
    with pytest.raises(ValueError, match="record_rows must be at least 2 with max_drafts = 0"):
        Engine(kimi, EngineConfig(record_rows=1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_batched_tokens": 100, "max_num_seqs": 64}, "max_num_batched_tokens must be at least 114.*got 100"),
        ({"max_drafts": 3, "rollback": "slots", "num_slots": 3}, "num_slots must be at least 4.*got 3"),
        ({"rollback": "undo"}, "rollback must be one of 'replay', 'slots', got 'undo'"),
        ({"max_drafts": 1, "batch_invariant": True}, "rollback must be 'slots' with batch_invariant"),
        ({"record_rows": 8, "batch_invariant": True}, "record_rows must be None with batch_invariant, got 8"),
        ({"record_rows": 8, "rollback": "slots"}, "record_rows must be None with rollback 'slots', got 8"),
        ({"max_cached_tokens": 0}, "max_cached_tokens must be at least 1, got 0"),
    ],
)
def test_configurations_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


class Chatty(Knowing):
    """Breaks the contract of drafters."""

    def __init__(self, drafts: list[int]):
        super().__init__({}, seed=0)
        self._drafts = drafts

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        return [self._drafts for _ in wanted]


@pytest.mark.parametrize("drafts", [[1, 2, 3], [256], [-1]])
def test_a_drafter_that_breaks_its_contract_is_named(kimi: Any, drafts: list[int]) -> None:
    engine = Engine(kimi, EngineConfig(max_drafts=2), Chatty(drafts))
    engine.add_request([1, 2], SamplingParams(max_new_tokens=8))
    engine.step()
    with pytest.raises(ValueError, match="drafter must propose at most 2 token ids below 256"):
        engine.step()
