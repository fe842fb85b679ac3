"""Prefill steps of each layer class on the torch backend, against the float64 reference."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rapidkda.integrations.vllm import metadata as steps
from rapidkda.integrations.vllm import plugin, wrap
from rapidkda.testing.tolerances import Bar, case_bar, relative_error

from .conftest import SEAMS
from .driver import SLOTS, Driver, Part, Request

Standin = Callable[..., Path]
log = logging.getLogger(__name__)

LAYERS = [("0.25.1", 0, None), ("0.33.0", 0, None), ("0.33.0", 0, -5.0), ("0.33.0", 1, -5.0), ("0.33.0", 2, -5.0)]
LAYERS += [("0.29.0", 0, None), ("0.30.0", 1, -5.0), ("0.30.0", 2, -5.0)]
NAMES = ["kimi-0.25", "kimi-0.33", "kimi-0.33-bounded", "kimi-k3", "glm", "kimi-0.29", "kimi-k3-0.30", "glm-0.30"]
SPECULATIVE = LAYERS[1:]


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=__name__)
    log.info("torch.manual_seed(%d)", torch.seed())  # fresh inputs every time; pytest shows the seed with a failure
    monkeypatch.setenv("RAPIDKDA_PREFILL_BACKEND", "torch")
    monkeypatch.setenv("RAPIDKDA_DECODE_BACKEND", "torch")


def drive(standin: Standin, layer: tuple[str, int, float | None], **options: object) -> Driver:
    version, index, lower_bound = layer
    standin(version)
    wrap.install(SEAMS[version], plugin.asked)
    return Driver(version, index, lower_bound=lower_bound, **options)  # type: ignore[arg-type]


def check(driver: Driver, parts: list[Part], out: Tensor, bar: Bar) -> None:
    """Outputs and caches of every request of a step, then advance."""
    start = 0
    for part in parts:
        want, state, history = driver.expected(part.request, part.fresh)
        got = out[start : start + part.count]
        start += part.count
        assert relative_error(got, want) <= bar.out
        slot = part.request.slots[0 if part.accept is None else part.count - 1]
        assert relative_error(driver.state_cache[slot], state) <= bar.state
        kept = driver.history(part.request.slots[0])
        if part.accept is None:
            kept = kept[: history.shape[0]]
        else:  # all tokens of a verified step are kept; its last W-1 entries are the newest
            kept = kept[part.count - 1 : part.count - 1 + history.shape[0]]
        assert relative_error(kept, history) <= bar.state
        driver.advance(part)


def untouched(driver: Driver, used: set[int], before: tuple[Tensor, Tensor]) -> None:
    """Slots that the step's requests do not own keep their bits, padding included."""
    rest = [slot for slot in range(SLOTS) if slot not in used]
    assert torch.equal(driver.conv_cache[rest], before[0][rest])
    assert torch.equal(driver.state_cache[rest], before[1][rest])


def run(driver: Driver, parts: list[Part], bar: Bar, padding: int = 0) -> None:
    before = driver.conv_cache.clone(), driver.state_cache.clone()
    out, metadata = driver.step(parts, padding)
    table = steps.tables(metadata)
    for segments in (table.prefill, table.verify):  # the host's lengths are those of the device
        if segments is not None:
            assert segments.host is not None
            assert segments.host[0].tolist() == segments.first_token.tolist()
            assert segments.host[1].tolist() == segments.length.tolist()
    untouched(driver, {slot for part in parts for slot in part.request.slots}, before)
    check(driver, parts, out, bar)


@pytest.mark.parametrize("dim_first", [False, True], ids=["SD", "DS"])
@pytest.mark.parametrize("layer", LAYERS, ids=NAMES)
def test_prefill_and_mixed_decode_steps(
    standin: Standin, layer: tuple[str, int, float | None], dim_first: bool
) -> None:
    driver = drive(standin, layer, dim_first=dim_first)
    bar = case_bar(torch.float32)
    a, b, c, d = (Request([slot]) for slot in (5, 3, 11, 7))
    # The first token's output is one product q.k, which may nearly vanish: no request stands on that term alone.
    run(driver, [Part(a, 33), Part(b, 3), Part(c, 4)], bar)
    run(driver, [Part(b, 1), Part(a, 17), Part(d, 48)], bar)  # a decode, a continued prefill, a first one
    run(driver, [Part(c, 1), Part(d, 1), Part(a, 16)], bar, padding=2)
    assert driver.layer.original_calls == []


@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[3]], ids=["kimi-0.25", "kimi-k3"])
def test_bfloat16(standin: Standin, layer: tuple[str, int, float | None]) -> None:
    driver = drive(standin, layer, dtype=torch.bfloat16)
    a, b = Request([2]), Request([9])
    run(driver, [Part(a, 40), Part(b, 20)], case_bar(torch.bfloat16))
    run(driver, [Part(a, 5), Part(b, 25)], case_bar(torch.bfloat16))


@pytest.mark.parametrize("layer", SPECULATIVE, ids=NAMES[1:])
def test_mixed_steps_with_speculative_requests(standin: Standin, layer: tuple[str, int, float | None]) -> None:
    """Verified requests between prefills, drafts of different counts, every accepted count."""
    driver = drive(standin, layer, num_spec=3)
    bar = case_bar(torch.float32)
    a, b, c, d = (Request([first, first + 1, first + 2, first + 3]) for first in (1, 5, 9, 13))
    run(driver, [Part(a, 20), Part(b, 7)], bar)
    run(driver, [Part(c, 30), Part(a, 4, accept=2), Part(d, 5), Part(b, 3, accept=3)], bar)
    run(driver, [Part(a, 2, accept=1), Part(c, 18), Part(b, 4, accept=4), Part(d, 1)], bar)  # d: one token, prefilled
    run(driver, [Part(c, 3), Part(b, 1, accept=1), Part(a, 4, accept=4)], bar, padding=1)
    run(driver, [Part(b, 2, accept=1), Part(c, 16), Part(a, 3, accept=2)], bar)
    assert driver.layer.original_calls == []


@pytest.mark.parametrize("layer", [LAYERS[3], LAYERS[4], LAYERS[6]], ids=["kimi-k3", "glm", "kimi-k3-0.30"])
def test_checkpoints_are_exported_into_their_slots(standin: Standin, layer: tuple[str, int, float | None]) -> None:
    driver = drive(standin, layer, num_spec=1)
    spec = driver.layer.get_kv_cache_spec(driver.vllm_config)
    assert (spec.num_prefill_checkpoint_blocks, spec.prefill_checkpoint_alignment) == (1, 16)
    bar = case_bar(torch.float32)
    a, b, c = Request([1, 2]), Request([3, 4]), Request([5, 6])
    run(driver, [Part(c, 8)], bar)
    driver.builder.checkpoints = ([32, 0, 0], [20, 0, 0])
    parts = [Part(a, 40), Part(c, 2, accept=1), Part(b, 9)]
    out, _ = driver.step(parts)
    _, state, history = driver.expected(a, parts[0].fresh, tokens=32)
    assert relative_error(driver.state_cache[20], state) <= bar.state
    assert relative_error(driver.history(20)[: history.shape[0]], history) <= bar.state
    check(driver, parts, out, bar)
    driver.builder.checkpoints = ([16, 48], [21, 22])
    parts = [Part(a, 24), Part(b, 50)]
    out, _ = driver.step(parts)
    for part, tokens, slot in zip(parts, (16, 48), (21, 22), strict=True):
        _, state, history = driver.expected(part.request, part.fresh, tokens=tokens)
        assert relative_error(driver.state_cache[slot], state) <= bar.state
        assert relative_error(driver.history(slot)[: history.shape[0]], history) <= bar.state
    check(driver, parts, out, bar)


@pytest.mark.parametrize("layer", LAYERS, ids=NAMES)
def test_steps_without_a_prefill_are_vllms_own(standin: Standin, layer: tuple[str, int, float | None]) -> None:
    driver = drive(standin, layer)
    before = driver.conv_cache.clone(), driver.state_cache.clone()
    request = Request([4])
    driver.step([Part(request, 1)])
    assert driver.layer.original_calls == ["step"]
    untouched(driver, set(), before)


@pytest.mark.parametrize("layer", LAYERS, ids=NAMES)
def test_lengths_come_from_the_device_when_the_builder_kept_none(
    standin: Standin, layer: tuple[str, int, float | None]
) -> None:
    speculative = layer[0] != "0.25.1"
    driver = drive(standin, layer, num_spec=1 if speculative else 0)
    a, b = Request([1, 2]), Request([3, 4])
    if not speculative:
        a, b = Request([1]), Request([3])
    run(driver, [Part(b, 4)], case_bar(torch.float32))
    build = driver.builder.build
    driver.builder.build = lambda *args: _without_host(build(*args))
    parts = [Part(a, 21), Part(b, 2, accept=1 if speculative else None)]
    out, metadata = driver.step(parts, padding=1)
    assert steps.tables(metadata).prefill.host is None
    check(driver, parts, out, case_bar(torch.float32))


def _without_host(metadata: object) -> object:
    delattr(metadata, steps.HOST)
    return metadata
