"""A known kind of call changes nothing: the same call reaches the backend, or the same error the caller."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import rapidkda
from bad_arguments import CALLS, GOOD, BadCall
from bad_arguments.registry import Arguments, debug_mode
from rapidkda import Checkpoints, Segments, dispatch
from rapidkda.backends.torch import TorchBackend
from rapidkda.ops import kinds

OPERATORS = ("prefill", "decode", "verify", "commit", "conv", "norm")
WHOLE = ("chunk_kda", "fused_recurrent_kda")
_bytes = torch.zeros(2**16, dtype=torch.uint8)
BYTES = _bytes[-_bytes.data_ptr() % 256 :]
CALLED = [op for op in GOOD if op not in ("resolve", "workspace_bytes")]


@pytest.fixture(autouse=True)
def no_kinds() -> Iterator[None]:
    kinds.forget()
    yield
    kinds.forget()
    MEMOS.clear()


@pytest.fixture(params=["guards of torch", "keys only"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without torch's own comparison of metadata."""
    if request.param == "keys only":
        monkeypatch.setattr(kinds, "_guard", lambda tensors: None)


def described(value: Any, given: Arguments) -> Any:
    """Everything that a backend can see of a call but its memo; what is not a given argument is new."""
    if isinstance(value, Tensor):
        starts = {x.data_ptr(): name for name, x in given.items() if isinstance(x, Tensor)}
        where = starts.get(value.data_ptr(), "new")
        return where, type(value), value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, Segments | Checkpoints):
        where = [name for name, x in given.items() if x is value]
        return where, described(value.host, given), value.kind
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: described(getattr(value, f.name), given) for f in fields(value) if f.name != "memo"}
    if isinstance(value, tuple):
        return [described(x, given) for x in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return type(value), repr(value)


MEMOS: dict[int, tuple[Any, Any]] = {}  # of each memo: itself, so that its id is its own, and what its calls are like


def outcome(op: str, arguments: Arguments) -> Any:
    """What a call comes to: the calls that reach the backend, or the error. Calls that share a memo must be alike."""
    log: list[Any] = []

    def record(name: str, call: Any) -> None:
        log.append((name, described(call, arguments)))
        alike = name, described(call, {})
        assert MEMOS.setdefault(id(call.memo), (call.memo, alike))[1] == alike

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATORS:
            patch.setattr(TorchBackend, name, lambda self, call, name=name: record(name, call))
        try:
            GOOD[op][0](**arguments)
        except AssertionError:
            raise
        except Exception as error:
            return type(error), str(error)
    return log


def outcome_without_kinds(op: str, arguments: Arguments) -> Any:
    known, latest = dict(kinds._known), dict(kinds._latest)
    kinds.forget()
    try:
        return outcome(op, arguments)
    finally:
        kinds.forget()
        kinds._known.update(known)
        kinds._latest.update(latest)


class Tensorlike:
    """Has a tensor's metadata and is none."""

    def __init__(self, tensor: Tensor):
        self.shape, self.dtype, self.device, self.ndim = tensor.shape, tensor.dtype, tensor.device, tensor.ndim
        self.stride, self.data_ptr = tensor.stride, tensor.data_ptr


def swapped(x: Tensor, storage: Tensor) -> Tensor:
    """The same tensor object over other memory."""
    x.data = storage
    return x


def wider(x: Tensor) -> Tensor:
    """The same values in columns of a wider buffer."""
    buffer = x.new_zeros(*x.shape[:-1], x.shape[-1] + 4)
    buffer[..., : x.shape[-1]] = x
    return buffer[..., : x.shape[-1]]


def shifted(x: Tensor) -> Tensor:
    """The same values one element further in memory."""
    buffer = x.new_empty(x.numel() + 1)[1:]
    return buffer.view(x.shape).copy_(x)


Change = Callable[[Arguments], Arguments]


def on(name: str, change: Callable[[Any], Any], kind: type = Tensor) -> Change:
    """Change an argument where it is given and still is what it was."""
    return lambda a: a | {name: change(a[name])} if isinstance(a.get(name), kind) else a


def to(name: str, value: Any, beside: str) -> Change:
    """Set an argument of the operators that take `beside`."""
    return lambda a: a | {name: value} if beside in a else a


def out_is(name: str) -> Change:
    """`out` in the place of an input of the same size."""
    return lambda a: (
        a | {"out": a[name].view_as(a["out"])}
        if isinstance(a.get("out"), Tensor)
        and isinstance(a.get(name), Tensor)
        and a[name].is_contiguous()
        and a[name].numel() == a["out"].numel()
        else a
    )


# What else may change between two calls.
CHANGES: dict[str, Change] = {
    "nothing": lambda a: a,
    **{
        f"{change.__name__} {name}": on(name, change)
        for name in ("q", "v", "beta", "state", "slots", "out", "A_log", "dt_bias", "x", "records", "initial_state")
        for change in (wider, shifted, Tensorlike, Tensor.clone)
    },
    **{
        f"{name} {value!r}": to(name, value, "q")
        for name, value in [
            ("scale", 0.5), ("scale", True), ("scale", 1), ("scale", 1.0), ("scale", 0.0), ("scale", -0.0),
            ("scale", np.float64(0.5)), ("scale", float("nan")), ("lower_bound", -5), ("lower_bound", -1.0),
            ("state_v_first", 1), ("state_v_first", False), ("use_qk_l2norm_in_kernel", False),
            ("use_qk_l2norm_in_kernel", 0), ("allow_neg_eigval", True), ("use_beta_sigmoid_in_kernel", False),
        ]
    },
    **{
        f"pad_slot {value!r}": to("pad_slot", value, "slots")
        for value in (-1, 1, True, 0, False, 1.0, np.int64(1), -(2**40))
    },
    **{
        f"backend {value!r}": lambda a, value=value: a | {"backend": value}
        for value in ("torch", "TORCH", "cuda", "nonsense", 3, ["torch"], dispatch.Choice("torch", "", "", {}))
    },
    **{f"out is {name}": out_is(name) for name in ("v", "x", "z")},
    "no out": on("out", lambda x: None),
    "other lengths": to("segments", Segments.from_lengths([19, 5]), "segments"),
    "fewer tokens": to("segments", Segments.from_lengths([16, 1]), "segments"),
    "lengths that only the device knows": on(
        "segments", lambda s: Segments(s.first_token, s.length, s.max_length), Segments
    ),
    "another checkpoint": to("checkpoints", Checkpoints.build([(0, 16, 3)], 2), "checkpoints"),
    "a checkpoint past its segment": to("checkpoints", Checkpoints.build([(0, 32, 3)], 2), "checkpoints"),
    "shorter pool of checkpoints": on("checkpoint_pool", lambda x: x[:2]),
    "workspace": to("workspace", BYTES[:4096], "checkpoints"),
    "workspace off its alignment": to("workspace", BYTES[1:4097], "checkpoints"),
    "state resized": on("state", lambda x: x.clone().resize_(2)),
    "state transposed in place": on("state", lambda x: x.clone().transpose_(-1, -2)),
    "state over other memory": on("state", lambda x: swapped(x.clone(), x.double())),
    "state over the same memory": on("state", lambda x: swapped(x.clone(), x)),
    "a parameter": on("A_log", torch.nn.Parameter),
    "gradients": on("v", lambda x: x.clone().requires_grad_()),
}  # fmt: skip
DRAWS = st.lists(
    st.tuples(
        st.sampled_from(CALLED),
        st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=2),
        st.sampled_from(["", "", "", "", "torch", "auto", "cuda", "nonsense"]),
    ),
    min_size=2,
    max_size=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(draws=DRAWS)
@pytest.mark.usefixtures("both_ways")
def test_random_calls_come_to_the_same_with_and_without_kinds(draws: list[tuple[str, list[str], str]]) -> None:
    kinds.forget()
    good = {op: GOOD[op][1]() for op in CALLED}
    for op, changes, wish in draws:
        arguments = dict(good[op])
        for change in changes:
            arguments = CHANGES[change](arguments)
        with pytest.MonkeyPatch.context() as patch:
            for variable in ("RAPIDKDA_PREFILL_BACKEND", "RAPIDKDA_DECODE_BACKEND"):
                patch.setenv(variable, wish)
            wanted = outcome_without_kinds(op, arguments)
            assert outcome(op, arguments) == wanted
            assert outcome(op, arguments) == wanted  # known by now, if it ever is


@pytest.mark.parametrize("op", ["prefill", "deferred", "causal_conv", "chunk_kda"])
@pytest.mark.usefixtures("both_ways")
def test_each_change_comes_to_the_same_after_each_other_of_its_sort(op: str) -> None:
    """What differs least: 0.0 after -0.0, a workspace off its alignment after one that is on it."""
    good = GOOD[op][1]()
    for before, after in itertools.permutations(CHANGES, 2):
        if before.split()[0] == after.split()[0] or "nothing" in (before, after):
            kinds.forget()
            for change in (before, before, after):
                arguments = CHANGES[change](good)
                seen = outcome(op, arguments)
            assert seen == outcome_without_kinds(op, arguments), (before, after)


@pytest.mark.parametrize("call", [call for call in CALLS if call.op in CALLED], ids=lambda call: call.id)
@pytest.mark.usefixtures("both_ways")
def test_a_known_kind_hides_no_error(call: BadCall) -> None:
    """The good call is known when the one that spoils it comes."""
    good = GOOD[call.op][1]()
    for _ in range(3):  # new, known by its key, known by its guard
        assert isinstance(outcome(call.op, good), list)
    arguments = call.change(good)
    with debug_mode(call.debug):
        error, message = outcome(call.op, arguments)
        assert (error, message) == outcome_without_kinds(call.op, arguments)
    assert issubclass(error, call.error)


@pytest.mark.parametrize("op", CALLED)
@pytest.mark.usefixtures("both_ways")
def test_a_call_is_known_the_second_time(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = GOOD[op][1]()
    first = outcome(op, arguments)
    assert len(kinds._known) == (3 if op == "prefill_layer" else 1)  # its neighbours are calls of their own

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("checked again")

    for name in ("dtype", "shape", "same_device", "dense_inner"):
        if op not in WHOLE:
            monkeypatch.setattr(f"rapidkda.checks.{name}", fail)
    for _ in range(3):
        assert outcome(op, arguments) == first


def test_calls_of_a_kind_share_a_memo_and_no_others() -> None:
    arguments = GOOD["prefill"][1]()
    memos = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "prefill", lambda self, call: memos.append(call.memo))
        for changes in (
            {},
            {"v": arguments["v"].clone()},
            {"segments": Segments.from_lengths([19, 5])},
            {"scale": 2.0},
        ):
            rapidkda.prefill(**arguments | changes)
    assert memos[0] is memos[1]
    assert len({id(memo) for memo in memos}) == 3


def test_a_copied_call_starts_with_an_empty_memo() -> None:
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "prefill", lambda self, call: calls.append(call))
        rapidkda.prefill(**GOOD["prefill"][1]())
    calls[0].memo["torch"] = 1
    assert replace(calls[0], out=torch.zeros(1)).memo == {}


def test_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "LIMIT", 4)
    arguments = GOOD["gated_rms_norm"][1]()
    for eps in range(1, 9):
        outcome("gated_rms_norm", arguments | {"eps": eps / 10})
        assert len(kinds._known) <= 4
        assert len(kinds._latest) <= 4
    newest = [frame[3][0] for frame, _ in kinds._known]
    assert newest == [0.5, 0.6, 0.7, 0.8]


def test_a_debug_run_knows_no_kinds() -> None:
    arguments = GOOD["prefill"][1]()
    outcome("prefill", arguments)
    arguments["slots"][0] = 99
    assert isinstance(outcome("prefill", arguments), list)
    with debug_mode(True):
        error, message = outcome("prefill", arguments)
        assert error is ValueError
        assert "slots" in message


def test_kinds_keep_no_tensor_alive() -> None:
    arguments = GOOD["prefill"][1]()
    tensors = [*(x for x in arguments.values() if isinstance(x, Tensor)), arguments["segments"].length]
    watched = [weakref.ref(x) for x in tensors]
    del tensors
    rapidkda.prefill(**arguments)
    rapidkda.prefill(**arguments)
    assert kinds._known
    del arguments
    gc.collect()
    assert not [ref() for ref in watched if ref() is not None]


def test_a_segment_table_keeps_the_host_values_that_it_was_made_with() -> None:
    first, length = np.array([0, 20]), np.array([20, 4])
    tables = torch.tensor([0, 20], dtype=torch.int32), torch.tensor([20, 4], dtype=torch.int32)
    segments = Segments(*tables, 20, (first, length))
    kind = segments.kind
    length[:] = [1, 23]
    assert segments.host is not None
    assert segments.host[1].tolist() == [20, 4]
    assert segments.kind == kind != Segments(*tables, 23, (first, np.array([1, 23]))).kind
    with pytest.raises(ValueError, match="read-only"):
        segments.host[1][0] = 5


def test_this_torch_compares_metadata_itself() -> None:
    """If this fails, torch has changed and every call reads the metadata of its tensors in Python again."""
    arguments = GOOD["prefill"][1]()
    for _ in range(2):
        rapidkda.prefill(**arguments)
    (kind,) = kinds._known.values()
    assert kind.guard is not None
    rapidkda.prefill(**arguments)
    assert kind.guards == 1
