"""Calls that are launched from addresses: those of their own tensors, in the order that the backend asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from bad_arguments import GOOD
from bad_arguments.registry import Arguments
from rapidkda import Checkpoints, Segments, dispatch
from rapidkda.backends.torch import TorchBackend
from rapidkda.ops import kinds
from rapidkda.problem import Repeat

OPERATORS = ("prefill", "decode", "verify", "commit", "conv", "norm")
CALLED = [op for op in GOOD if op not in ("resolve", "workspace_bytes", "chunk_kda", "fused_recurrent_kda")]
_bytes = torch.zeros(2**16, dtype=torch.uint8)
BYTES = _bytes[-_bytes.data_ptr() % 256 :]


class Recorder:
    """In the place of the torch backend: runs nothing, and keeps what would run."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.launched: list[tuple[int, ...]] = []
        self.launches = True
        self.aligned: tuple[str, ...] = ()

    def run(self, call: Any) -> None:
        self.calls.append(call)
        call.repeat = Repeat(tuple(held(call)), self.launch, tuple([getattr(call, name) for name in self.aligned]))

    def launch(self, addresses: tuple[int, ...]) -> bool:
        if self.launches:
            self.launched.append(addresses)
        return self.launches


def held(value: Any) -> Iterator[Tensor]:
    """Every tensor of a call."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            if field.name not in ("memo", "repeat", "host", "kind"):
                yield from held(getattr(value, field.name))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    for name in OPERATORS:
        monkeypatch.setattr(TorchBackend, name, lambda self, call: recorder.run(call))
    monkeypatch.setattr(TorchBackend, "unfused", lambda self, call: {}, raising=False)
    kinds.forget()
    yield recorder
    kinds.forget()


def copied(value: Any) -> Any:
    """The same arguments in other memory."""
    if isinstance(value, dict):
        return {name: copied(x) for name, x in value.items()}
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Segments):
        return Segments(value.first_token.clone(), value.length.clone(), value.max_length, value.host)
    if isinstance(value, Checkpoints):
        return Checkpoints(value.begin.clone(), value.offset.clone(), value.slot.clone(), value.host)
    return value


def arguments(op: str) -> Arguments:
    given = GOOD[op][1]()
    if "slots" in given and op not in ("verify", "replay", "deferred", "commit"):
        given["read_slots"] = torch.tensor([4, 1], dtype=torch.int32)
    return given


@pytest.mark.parametrize("op", CALLED)
def test_later_calls_are_launched_from_their_own_addresses(op: str, recorder: Recorder) -> None:
    run = GOOD[op][0]
    first = arguments(op)
    calls = [copied(first) for _ in range(3)]
    wanted = []
    for given in calls:
        kinds.forget()
        run(**given)
        wanted.append(tuple([x.data_ptr() for x in held(recorder.calls[-1])]))
    kinds.forget()
    run(**first)
    before = len(recorder.calls)
    for given in calls:
        result = run(**given)
        assert result is given.get("out")
    assert len(recorder.calls) == before
    assert recorder.launched == wanted


def test_a_tensor_in_its_two_usual_places_is_found_in_both(recorder: Recorder) -> None:
    """A norm in place, and checkpoints that are exported into the pool of states."""
    run, good = GOOD["gated_rms_norm"]
    for _ in range(3):
        given = good()
        x = given["x"]
        assert run(**given | {"out": x}) is x
    assert len(recorder.calls) == 1
    assert recorder.launched[-1] == (x.data_ptr(), given["z"].data_ptr(), given["weight"].data_ptr(), x.data_ptr())
    run(**given)  # of another kind
    assert len(recorder.calls) == 2
    run, good = GOOD["prefill"]
    for _ in range(3):
        given = good()
        run(**given | {"checkpoint_pool": given["state"]})
    assert len(recorder.calls) == 3
    assert recorder.launched[-1].count(given["state"].data_ptr()) == 3  # read, written, exported to


def test_a_tensor_that_is_two_arguments_does_not_say_which_one_is_meant(recorder: Recorder) -> None:
    run, good = GOOD["prefill"]
    for n in range(1, 4):
        given = good()
        run(**given | {"read_slots": given["slots"]})
        assert len(recorder.calls) == n
    run(**given | {"read_slots": given["slots"].clone()})  # says it
    other = torch.tensor([3, 1], dtype=torch.int32)
    run(**given | {"read_slots": other})
    assert len(recorder.calls) == 4
    assert other.data_ptr() in recorder.launched[-1]


def test_what_no_kind_holds_is_still_checked(recorder: Recorder) -> None:
    run, good = GOOD["prefill"]
    given = good() | {"workspace": BYTES[:4096]}
    for _ in range(2):
        run(**given)
    assert len(recorder.launched) == 1
    with pytest.raises(ValueError, match="workspace"):
        run(**given | {"workspace": BYTES[1:4097]})
    with pytest.raises(ValueError, match="out"):
        run(**given | {"out": given["v"]})
    assert len(recorder.launched) == 1
    assert len(recorder.calls) == 1


def test_a_call_that_the_backend_does_not_launch_so_goes_the_usual_way(recorder: Recorder) -> None:
    run, good = GOOD["prefill"]
    recorder.aligned = ("out", "initial")
    given = good()
    for _ in range(2):
        run(**given)
    assert (len(recorder.calls), len(recorder.launched)) == (1, 1)
    buffer = torch.zeros(given["out"].numel() + 1)
    run(**given | {"out": buffer[1:].view(given["out"].shape)})
    assert (len(recorder.calls), len(recorder.launched)) == (2, 1)
    recorder.launches = False
    run(**given)
    assert (len(recorder.calls), len(recorder.launched)) == (3, 1)


def test_a_guest_sees_every_call(recorder: Recorder) -> None:
    class Guest(TorchBackend):
        name = "guest"

    run, good = GOOD["decode"]
    with dispatch.guest(Guest()) as name:
        for n in range(1, 4):
            run(**good(), backend=name)
            assert len(recorder.calls) == n
    assert not recorder.launched
