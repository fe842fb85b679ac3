"""The scheduler alone, under random load: limits hold in every step, every step gets on, and all requests end."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rapidkda.engine import EngineConfig, Request, RequestStats, SamplingParams
from rapidkda.engine.sampling import Sampler
from rapidkda.engine.scheduler import Scheduler
from rapidkda.serving import StatePool, StateShape


@st.composite
def configurations(draw: st.DrawFn) -> EngineConfig:
    seqs = draw(st.integers(1, 6))
    chunk = draw(st.integers(1, 9))
    drafts = draw(st.integers(0, 4))
    rollback: Any = draw(st.sampled_from(["replay", "slots"]))
    each = 1 + drafts if rollback == "slots" else 1
    return EngineConfig(
        max_num_seqs=seqs,
        prefill_chunk=chunk,
        max_num_batched_tokens=max(2, seqs + chunk + draw(st.integers(0, 10))),
        max_drafts=drafts,
        rollback=rollback,
        num_slots=each * draw(st.integers(1, seqs)),
        max_cached_tokens=draw(st.one_of(st.none(), st.integers(30, 80))),
        batch_invariant=rollback == "slots" and draw(st.booleans()),
    )


def new_request(name: int, prompt: int, new: int) -> Request:
    params = SamplingParams(max_new_tokens=new)
    return Request(name, tuple(range(1, prompt + 1)), params, Sampler(params), RequestStats(0.0, prompt))


@settings(max_examples=200, deadline=None)
@given(
    configurations(),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_random_load(config: EngineConfig, sizes: list[tuple[int, int]], rng: Any) -> None:
    pool = StatePool(
        StateShape(heads=1, key_dim=1, value_dim=1, max_drafts=config.max_drafts, rollback=config.rollback),
        config.slots,
    )

    def release(request: Request) -> None:
        pool.free(request.request_id)
        request.slots = ()
        request.computed = 0

    scheduler = Scheduler(config, pool, release)
    requests = [new_request(name, prompt, new) for name, (prompt, new) in enumerate(sizes)]
    arriving = list(requests)
    ended: list[Request] = []
    first_seen: list[Any] = []
    for _ in range(5000):
        while arriving and rng.random() < 0.5:
            request = arriving.pop(0)
            assert scheduler.refusal(len(request.prompt), request.params.max_new_tokens) is None
            scheduler.add(request)
        drafts = {
            r.request_id: [0] * rng.randint(0, min(config.max_drafts, r.useful_drafts)) for r in scheduler.decoding()
        }
        parts = scheduler.schedule(drafts)
        live = scheduler.running + list(scheduler.waiting)
        assert bool(parts) == bool(live)
        assert sum(len(part.tokens) for part in parts) <= config.max_num_batched_tokens
        assert len(scheduler.running) <= config.max_num_seqs
        assert len({id(part.request) for part in parts}) == len(parts)
        for part in parts:
            request = part.request
            assert request in scheduler.running
            assert pool.slots is not None
            assert pool.slots.slots_of(request.request_id) == request.slots
            if part.prefill:
                start = request.computed
                assert part.tokens == request.tokens[start : start + len(part.tokens)]
                if config.batch_invariant:
                    assert len(part.tokens) in (config.chunk, request.pending)
            else:
                assert part.tokens == [request.tokens[-1], *part.drafts]
                assert len(part.drafts) <= len(drafts[request.request_id])
            if request.request_id not in first_seen:
                first_seen.append(request.request_id)
        if config.max_cached_tokens is not None:
            held = sum(request.computed for request in scheduler.running)
            assert held + sum(len(part.tokens) for part in parts) <= config.max_cached_tokens
        for part in parts:
            request = part.request
            accepted = rng.randint(0, len(part.drafts))
            request.computed += len(part.tokens) if part.prefill else 1 + accepted
            if not part.prefill or request.pending == 0:
                request.tokens += [0] * (1 + accepted)
            if request.produced >= request.params.max_new_tokens:
                assert request.produced == request.params.max_new_tokens
                release(request)
                scheduler.remove(request)
                ended.append(request)
        if not live and not arriving:
            break
    assert len(ended) == len(requests)
    assert first_seen == [request.request_id for request in requests]
    assert pool.slots is not None
    assert pool.slots.available == config.slots
