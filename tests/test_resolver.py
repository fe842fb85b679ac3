"""The resolver: every device, dtype, head dim, gate, state dtype, wish and source of the wish, enumerated.

`NEEDS` is an independent statement of what each backend requires, one phrase a requirement; the reasons that the
library gives must match it one to one.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import rapidkda
from rapidkda import (
    BackendUnavailable,
    ConfigConflict,
    Request,
    Sizes,
    dispatch,
    env,
    resolve_kda_prefill_backend,
    workspace_bytes,
)
from rapidkda.backends import cuda, flashkda, triton
from rapidkda.backends.triton import config
from rapidkda.device import CPU, Device
from rapidkda.dispatch import REGISTRY, decision_table, resolve
from rapidkda.ops import kinds
from rapidkda.problem import OPS, GateKind


def nvidia(major: int, minor: int) -> Device:
    return Device("nvidia", f"GPU {major}.{minor}", capability=(major, minor))


DEVICES = {
    "8.0": nvidia(8, 0),
    "8.9": nvidia(8, 9),
    "9.0": nvidia(9, 0),
    "10.0": nvidia(10, 0),
    "10.3": nvidia(10, 3),
    "12.0": nvidia(12, 0),
    "cpu": CPU,
    "rocm": Device("amd", "MI300X", arch="gfx942"),
    "old": nvidia(7, 5),
    "old_rocm": Device("amd", "MI100", arch="gfx908"),
    "other": Device("other", "mps"),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIMS = ((64, 64), (128, 128), (256, 256), (64, 128), (128, 64), (96, 128))
GATES: tuple[GateKind, ...] = ("bounded", "softplus", "log_decay")
STATES = (torch.float32, torch.bfloat16)
HALF = (torch.bfloat16,)


def needs(name: str, request: Request, installed: bool) -> list[str]:
    """A phrase for each requirement of a backend that a prefill request does not meet."""
    device, dims = request.device, (request.key_dim, request.value_dim)
    unmet: list[str] = []

    def must(condition: bool, phrase: str) -> None:
        if not condition:
            unmet.append(phrase)

    if name == "cuda":
        must(device.capability == (9, 0), "compute capability 9.0")
        must(request.dtype in HALF, "bfloat16")
        must(dims == (128, 128), "head dims")
        must(not request.requires_grad, "backward")
        must(installed, "package")
    elif name == "triton":
        served = (device.capability or (0, 0)) >= (8, 0) or device.arch in ("gfx942", "gfx950")
        must(served, "got " + str(device))
        for what, dim in (("key dim", request.key_dim), ("value dim", request.value_dim)):
            must(dim in (64, 128, 256), what)
        must(not request.requires_grad, "gradient")
        must(installed, "triton is not installed")
    elif name == "flashkda":
        must((device.capability or (0, 0))[0] in (9, 10, 12), "NVIDIA" if device.capability is None else "capability")
        must(request.dtype in HALF, "bfloat16")
        must(dims == (128, 128), "head dims")
        must(request.gate == "bounded", "bounded")
        must(not request.grouped_values, "value heads")
        must(not request.requires_grad, "gradient")
        must(not request.checkpoints, "checkpoints")
        must(installed, "extension")
    return unmet


@pytest.fixture(params=[True, False], ids=["installed", "bare"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A machine with every optional package, and one with none."""
    present = bool(request.param)
    extension = flashkda.Extension(lambda *_: None, lambda *_: 0)
    monkeypatch.setattr(cuda, "_missing_packages", lambda: () if present else ("needs the packages cuda-core",))
    monkeypatch.setattr(triton, "_triton_version", lambda: (3, 6) if present else None)
    monkeypatch.setattr(flashkda, "find_extension", lambda: extension if present else "no extension is installed")
    monkeypatch.setattr(flashkda, "missing_package", lambda: None if present else "no extension is installed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("RAPIDKDA_PREFILL_BACKEND", raising=False)
    return present


def requests(device: Device) -> Iterator[Request]:
    flags = itertools.product((False, True), repeat=3)
    for dtype, dims, gate, state, (grouped, grad, checkpoints) in itertools.product(DTYPES, DIMS, GATES, STATES, flags):
        yield Request("prefill", device, dtype, *dims, gate, state, grouped, grad, checkpoints)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_request_on_every_device(device: Device, installed: bool) -> None:
    """Reasons are complete, explicit wishes run or raise with all of them, and auto takes the first that can run."""
    for request in requests(device):
        able = []
        for name in REGISTRY:
            unmet, phrases = dispatch.load(name).unmet(request), needs(name, request, installed)
            assert len(unmet) == len(phrases), f"{name}, {request}: {unmet} instead of {phrases}"
            assert all(any(phrase in reason for reason in unmet) for phrase in phrases), f"{name}: {unmet}, {phrases}"
            if not unmet:
                able.append(name)
                assert resolve(request, name, "argument").name == name
                continue
            with pytest.raises(BackendUnavailable) as caught:
                resolve(request, name, "argument")
            assert caught.value.reasons == {name: tuple(unmet)}
            assert all(reason in str(caught.value) for reason in unmet)
        choice = resolve(request)
        assert choice.name == able[0]
        skipped = list(REGISTRY)[: list(REGISTRY).index(choice.name)]
        assert list(choice.passed_over) == skipped
        for name in skipped:
            assert choice.passed_over[name] == tuple(dispatch.load(name).unmet(request))
            assert all(reason in str(choice) for reason in choice.passed_over[name])


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_auto_is_total(device: Device, op: str, installed: bool) -> None:
    """For every operator something runs everywhere, and the table of `doctor` agrees with the resolver."""
    for dtype, dims, gate, state in itertools.product(DTYPES, DIMS, GATES, STATES):
        request = Request(op, device, dtype, *dims, gate, state)  # type: ignore[arg-type]
        choice = resolve(request)
        table = decision_table(request, (op,))[op]  # type: ignore[index,arg-type]
        assert table[choice.name] == ()
        assert {name: unmet for name, unmet in table.items() if name in choice.passed_over} == choice.passed_over


def test_forms_of_rollback_have_backends_of_their_own(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cuda backend has replay only, and is left to it where triton's kernel in Gluon does not run."""
    for gluon, rollback, fastest in (
        (True, "replay", "triton"),
        (False, "replay", "cuda"),
        (True, "slots", "triton"),
        (False, "slots", "triton"),
    ):
        monkeypatch.setattr(config, "_GLUON", gluon)
        request = Request("verify", DEVICES["9.0"], rollback=rollback)
        assert resolve(request).name == (fastest if installed else "torch")
        asked_first = "triton" if installed and gluon and rollback == "replay" else "cuda"
        assert next(iter(decision_table(request, ("verify",))["verify"])) == asked_first
    (reason,) = (line for line in dispatch.load("cuda").unmet(request) if "a slot a position" in line)
    assert not any("a slot a position" in line for line in dispatch.load("cuda").unmet(replace(request, op="decode")))
    with pytest.raises(BackendUnavailable, match=r"cannot run verify here(.|\n)*" + re.escape(reason)):
        resolve(request, "cuda", "argument")


@pytest.mark.parametrize(
    ("fastest", "terms"),
    [
        ("triton", {"records": 8}),
        ("cuda", {"records": 9}),
        ("triton", {"records": 16, "deferred": True}),
        ("triton", {"records": 32, "most_tokens": 8, "deferred": True}),
        ("cuda", {"records": 32, "most_tokens": 9, "deferred": True}),
        ("cuda", {"records": 33, "most_tokens": 2, "deferred": True}),
        ("cuda", {"state_v_first": False}),
    ],
)
def test_replay_goes_where_its_sizes_run_fastest(
    fastest: str, terms: dict[str, Any], installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_GLUON", True)
    request = Request("verify", DEVICES["9.0"], **terms)
    assert resolve(request).name == (fastest if installed else "torch")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_public_resolver_asks_for_the_same(device: Device, installed: bool) -> None:
    """resolve_kda_prefill_backend forms the request from its arguments; lower_bound None is the softplus gate."""
    for dtype, dims, bound, state in itertools.product(DTYPES, DIMS, (None, -5.0), STATES):
        choice = resolve_kda_prefill_backend(
            device=device, dtype=dtype, head_dim=dims[0], value_dim=dims[1], lower_bound=bound, state_dtype=state
        )
        gate: GateKind = "softplus" if bound is None else "bounded"
        assert choice == resolve(Request("prefill", device, dtype, *dims, gate, state))


SOURCES = ("argument backend", "engine flag --kda-prefill-backend", 'additional_config["kda_prefill_backend"]',
           "environment variable RAPIDKDA_PREFILL_BACKEND")  # fmt: skip


def ask(wishes: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch) -> dispatch.Choice:
    argument, flag, config, variable = wishes
    if variable is None:
        monkeypatch.delenv("RAPIDKDA_PREFILL_BACKEND", raising=False)
    else:
        monkeypatch.setenv("RAPIDKDA_PREFILL_BACKEND", variable)
    configuration = None if config is None else {"kda_prefill_backend": config, "another_key": 1}
    return resolve_kda_prefill_backend(argument, engine_flag=flag, additional_config=configuration, device="cpu")


@pytest.mark.parametrize("wishes", list(itertools.product((None, "auto", "torch", "flashkda"), repeat=4)))
def test_every_combination_of_sources(
    wishes: tuple[str | None, ...], installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One wish, or the same from several sources, holds; two that differ raise and name both."""
    given = {source: wish for source, wish in zip(SOURCES, wishes, strict=True) if wish is not None}
    if len(set(given.values())) > 1:
        with pytest.raises(ConfigConflict) as conflict:
            ask(wishes, monkeypatch)
        assert all(f"{source} asks for {wish!r}" in str(conflict.value) for source, wish in given.items())
        return
    wish = next(iter(given.values()), "auto")
    if wish == "flashkda":  # never on a CPU, and no silent fallback
        with pytest.raises(BackendUnavailable) as refused:
            ask(wishes, monkeypatch)
        assert next(iter(given)) in str(refused.value)
        return
    choice = ask(wishes, monkeypatch)
    assert choice.name == "torch"
    assert choice.source == next(iter(given), "auto")


@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("name", ["fla", "cudnn", "torch2", "none"])
def test_unknown_names_list_the_known_ones(position: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes: list[str | None] = [None] * 4
    wishes[position] = name
    with pytest.raises(ValueError, match="must be one of auto, cuda, triton, flashkda, torch") as unknown:
        ask(tuple(wishes), monkeypatch)
    assert SOURCES[position] in str(unknown.value)
    assert repr(name) in str(unknown.value)


@pytest.mark.parametrize("spelling", ["TORCH", " torch ", "Torch"])
def test_names_are_read_without_case_or_space(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask((None, None, None, spelling), monkeypatch).name == "torch"


def test_an_empty_variable_is_no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask((None, None, None, "  "), monkeypatch).source == "auto"


def test_configuration_without_the_key_is_no_wish() -> None:
    assert resolve_kda_prefill_backend(additional_config={"other": "cuda"}, device="cpu").source == "auto"


def test_the_choice_is_logged_once_with_its_reasons(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rapidkda"):
        choice = resolve_kda_prefill_backend(device="cpu")
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert len(lines) == 1
    assert all(f"{name} passed over" in lines[0] for name in choice.passed_over)
    assert set(choice.passed_over) == {"cuda", "triton", "flashkda"} - {choice.name}


@pytest.mark.parametrize("heads", [3, 6, 7, 12])
def test_head_count_decides_nothing(heads: int, installed: bool) -> None:
    """B37: few heads a rank do not fall off to another path; the choice names everyone that it passed over."""
    choice = resolve_kda_prefill_backend(device=DEVICES["9.0"], lower_bound=-5.0)
    assert choice.name == ("cuda" if installed else "torch")
    assert all(choice.passed_over.values())
    x = torch.zeros(1, 3, heads, 16)
    out, _ = rapidkda.chunk_kda(x, x, x, x, x[..., 0], backend="auto")[:2]
    assert out.shape == x.shape


def test_a_missing_build_is_found_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    """B89: without a working compiler auto falls back with the reason, and the explicit wish raises at once."""
    monkeypatch.setattr(cuda, "_missing_packages", lambda: ("needs NVRTC, package nvidia-cuda-nvrtc",))
    monkeypatch.setattr(triton, "_triton_version", lambda: (2, 1))
    choice = resolve_kda_prefill_backend(device=DEVICES["9.0"], lower_bound=-5.0)
    assert choice.name not in ("cuda", "triton")
    assert "NVRTC" in str(choice)
    assert "2.1" in str(choice)
    with pytest.raises(BackendUnavailable, match="NVRTC"):
        resolve_kda_prefill_backend("cuda", device=DEVICES["9.0"], lower_bound=-5.0)


GRID = list(itertools.product((16, 64, 128), STATES, (False, True), (False, True), (False, True)))


@pytest.mark.parametrize(("dim", "state", "indexed", "strided", "packed"), GRID)
def test_auto_gives_what_the_explicit_backend_gives(
    dim: int, state: torch.dtype, indexed: bool, strided: bool, packed: bool
) -> None:
    """B90: wherever a backend works by name, auto works, with the same outputs and the same pool."""
    from rapidkda.testing import Shape, make_inputs

    shape = Shape("grid", (5, 9) if packed else (14,), 2, key_dim=dim, value_dim=dim)
    inputs = make_inputs(shape, "slow", layout="fused" if strided else "dense")
    count = len(shape.seq_lens)
    results = {}
    for name in ("auto", "torch"):
        pool = torch.zeros(6, 2, dim, dim, dtype=state)
        slots = torch.tensor([4, 2][:count] if indexed else list(range(count)))
        pool[slots] = inputs.states.to(state)
        out = rapidkda.prefill(
            *inputs.operands(), **inputs.options(), segments=inputs.segments, state=pool, slots=slots, backend=name
        )
        results[name] = out, pool
    assert torch.equal(results["auto"][0], results["torch"][0])
    assert torch.equal(results["auto"][1], results["torch"][1])


@pytest.mark.parametrize("op", ["decode", "verify", "norm"])
def test_decode_has_the_same_kind_of_knob(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RAPIDKDA_DECODE_BACKEND is read by decode, verify and their neighbours, and not by prefill."""
    x = torch.zeros(1, 2, 16)
    pool, slots = torch.zeros(3, 2, 16, 16), torch.tensor([[1]])
    one = rapidkda.Segments.equal(1, 1)
    options = {"lower_bound": -1.0}
    calls = {
        "decode": lambda: rapidkda.decode(x, x, x, x, x[..., 0], state=pool, slots=slots[:, 0], **options),
        "verify": lambda: rapidkda.verify(
            x, x, x, x, x[..., 0], state=pool, slots=slots, segments=one, accepted=torch.tensor([1]), **options
        ),
        "norm": lambda: rapidkda.gated_rms_norm(x, x, x[0, 0]),
    }
    calls[op]()
    monkeypatch.setenv("RAPIDKDA_DECODE_BACKEND", "flashkda")
    with pytest.raises(BackendUnavailable, match="RAPIDKDA_DECODE_BACKEND"):
        calls[op]()
    rapidkda.prefill(x, x, x, x, x[..., 0], segments=one, **options)
    monkeypatch.setenv("RAPIDKDA_DECODE_BACKEND", "fastest")
    with pytest.raises(ValueError, match="RAPIDKDA_DECODE_BACKEND must be one of"):
        calls[op]()


def test_a_layer_resolves_its_neighbours_before_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm comes after the prefill; the environment may have changed since a call of the kind."""
    x, z, state = torch.ones(2, 96), torch.zeros(2, 2, 16), torch.zeros(3, 2, 16, 16)
    given = {
        "g": z,
        "beta": z[..., 0],
        "z": z,
        "norm_weight": z[0, 0],
        "segments": rapidkda.Segments.equal(2, 1),
        "state": state,
        "slots": torch.tensor([1, 2]),
        "lower_bound": -1.0,
        "backend": "torch",
    }
    for name, error in (("flashkda", BackendUnavailable), ("fastest", ValueError)):
        kinds.forget()
        for known in (False, True):
            before = state.clone()
            with pytest.raises(error, match="neighbour_backend"):
                rapidkda.prefill_layer(x, **given, neighbour_backend=name)
            with monkeypatch.context() as patch:
                patch.setenv("RAPIDKDA_DECODE_BACKEND", name)
                with pytest.raises(error, match="RAPIDKDA_DECODE_BACKEND"):
                    rapidkda.prefill_layer(x, **given)
            assert torch.equal(state, before), known
            rapidkda.prefill_layer(x, **given)
            assert not torch.equal(state, before)


def test_a_verification_says_how_its_drafts_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    torch_backend = dispatch.load("torch")
    monkeypatch.setattr(torch_backend, "unmet", lambda request: asked.append(request) or [], raising=False)
    dispatch.resolve_cached.cache_clear()
    kinds.forget()
    x, state, one = torch.zeros(1, 2, 16), torch.zeros(3, 2, 16, 16), rapidkda.Segments.equal(1, 1)
    records, slots, accepted = torch.zeros(3, 1, 2, 48), torch.tensor([1]), torch.tensor([0])
    given = {"segments": one, "state": state, "accepted": accepted, "lower_bound": -1.0, "backend": "torch"}
    rapidkda.verify(x, x, x, x, x[..., 0], slots=slots[:, None], **given)
    rapidkda.verify(x, x, x, x, x[..., 0], slots=slots, records=records, state_v_first=False, **given)
    rapidkda.commit(state=state, records=records, held=None, slots=slots, accepted=accepted, backend="torch")
    assert [request.rollback for request in asked] == ["slots", "replay", "replay"]
    assert [request.records for request in asked] == [None, 1, 1]
    assert [request.most_tokens for request in asked] == [1, 1, None]
    assert [request.state_v_first for request in asked] == [True, False, True]


def test_a_choice_made_earlier_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = resolve_kda_prefill_backend("torch", device="cpu")
    monkeypatch.setenv("RAPIDKDA_PREFILL_BACKEND", "flashkda")  # too late to matter
    x = torch.ones(1, 2, 16)
    out = rapidkda.prefill(
        x, x, x, x, x[..., 0], segments=rapidkda.Segments.equal(1, 1), lower_bound=-1.0, backend=choice
    )
    assert out.shape == x.shape


def test_scratch_is_that_of_the_operators_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill variable binds prefill, the decode variable everything else."""
    sizes = Sizes(tokens=4, segments=1, heads=2, value_heads=2)
    for variable, bound, free in (
        (env.PREFILL_BACKEND, "prefill", "decode"),
        (env.DECODE_BACKEND, "decode", "prefill"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "flashkda")
            with pytest.raises(BackendUnavailable, match=f"flashkda.*cannot run {bound}"):
                workspace_bytes(bound, sizes, device="cpu")  # type: ignore[arg-type]
            assert workspace_bytes(free, sizes, device="cpu") == 0  # type: ignore[arg-type]
