"""What a step's calls tell the driver, without one: which kernel, which fields, which accesses may be vectors."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rapidkda
from rapidkda import Segments
from rapidkda.backends import driver
from rapidkda.backends.cuda import CudaBackend, compiler
from rapidkda.backends.cuda.host import step_params, steps
from rapidkda.backends.cuda.host.step_params import ADDRESSES, Constants, Flags
from rapidkda.ops import kinds

HEADS, VALUE_HEADS, COUNT = 2, 4, 3
VECTORS = Flags.VECTOR_INPUTS | Flags.VECTOR_STATES | Flags.VECTOR_RECORDS


class Driver:
    """Takes launches: the kernel, the grid, the addresses and the constants of each."""

    def __init__(self) -> None:
        self.kernels: dict[int, compiler.KernelSource] = {}
        self.launched: list[tuple[compiler.KernelSource, int, dict[str, int], Constants]] = []

    def load(self, kernel: compiler.KernelSource, device: int) -> compiler.LoadedKernel:
        self.kernels[len(self.kernels) + 1] = kernel
        return compiler.LoadedKernel(len(self.kernels), 256, 0, 1, None)

    def launch(self, configuration_at: int, function: int, pointers_at: int, extra: None) -> int:
        told = driver._Configuration.from_address(configuration_at)
        start = ctypes.c_void_p.from_address(pointers_at).value
        assert start is not None
        parameter = ctypes.string_at(start, step_params.SIZE)
        addresses = struct.unpack_from(f"<{len(ADDRESSES)}Q", parameter)
        constants = Constants(*step_params._CONSTANTS.unpack_from(parameter, 8 * len(ADDRESSES)))
        self.launched.append((self.kernels[function], told.grid[0], dict(zip(ADDRESSES, addresses)), constants))
        return 0


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    told = Driver()
    monkeypatch.setattr(driver, "_entry", lambda name: told.launch)
    monkeypatch.setattr(compiler, "load", told.load)
    monkeypatch.setattr(steps, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(CudaBackend, "unmet", lambda self, request: [])
    kinds.forget()
    rapidkda.dispatch.resolve_cached.cache_clear()
    yield told
    kinds.forget()
    rapidkda.dispatch.resolve_cached.cache_clear()


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, past: int = 0, spare: int = 0) -> Tensor:
    """Zeros `past` elements after a multiple of 64 bytes, with `spare` elements after each row of the first dim."""
    row = torch.Size(shape[1:]).numel()
    flat = torch.zeros(shape[0] * (row + spare) + 64 + past, dtype=dtype)
    start = -flat.data_ptr() % 64 // dtype.itemsize + past
    return torch.as_strided(flat, shape, (row + spare, *torch.empty(shape).stride()[1:]), start)


def inputs(tokens: int, **changed: Tensor) -> dict[str, Any]:
    return {
        "q": tensor(tokens, HEADS, 128),
        "k": tensor(tokens, HEADS, 128),
        "v": tensor(tokens, VALUE_HEADS, 128),
        "g": tensor(tokens, VALUE_HEADS, 128),
        "beta": tensor(tokens, VALUE_HEADS),
        "A_log": torch.zeros(VALUE_HEADS),
        "dt_bias": torch.zeros(VALUE_HEADS, 128),
        "out": tensor(tokens, VALUE_HEADS, 128),
        "state": tensor(9, VALUE_HEADS, 128, 128, dtype=torch.float32),
        **changed,
    }


def verify(count: int, **changed: Any) -> None:
    """One token of each request."""
    given = inputs(count) | {
        "state": tensor(max(count, 9), VALUE_HEADS, 128, 128, dtype=torch.float32),
        "records": tensor(max(count, 9), 2, VALUE_HEADS, 384, dtype=torch.float32),
        "slots": torch.arange(count),
        "accepted": torch.ones(count, dtype=torch.int32),
        "segments": Segments.equal(count, 1),
    }
    rapidkda.verify(**(given | changed), backend="cuda")


def named(given: dict[str, Any], addresses: dict[str, int]) -> dict[str, str]:
    """Fields by the argument whose address they hold."""
    at = {value.data_ptr(): name for name, value in given.items() if isinstance(value, Tensor)}
    segments = given.get("segments")
    if segments is not None:
        at |= {segments.first_token.data_ptr(): "first_token", segments.length.data_ptr(): "length"}
    return {field: at[address] for field, address in addresses.items() if address}


TOKENS = {name: name for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "out", "first_token", "length")}


@pytest.mark.parametrize(
    ("positions", "tokens", "many_turns"),
    [(2, "2", "false"), (3, "4", "false"), (4, "4", "false"), (5, "8", "false"), (8, "8", "false"), (11, "8", "true")],
)
def test_calls_take_the_smallest_chunk_that_holds_its_drafts(
    fake: Driver, positions: int, tokens: str, many_turns: str
) -> None:
    segments = Segments.from_lengths([2] * COUNT)
    records = torch.zeros(9, positions, VALUE_HEADS, 384)
    slots, accepted = torch.arange(COUNT), torch.zeros(COUNT, dtype=torch.int32)
    given = inputs(2 * COUNT) | {"segments": segments, "slots": slots, "records": records, "accepted": accepted}
    rapidkda.verify(**given, backend="cuda")
    rapidkda.commit(
        state=given["state"],
        records=records,
        held=None,
        slots=slots,
        accepted=accepted,
        state_v_first=True,
        backend="cuda",
    )
    (verify, _, addresses, constants), (commit, grid, committed, fewer) = fake.launched
    assert verify == commit
    assert verify in steps.kernels()
    macros = dict(verify.macros)
    assert (macros["KDA_TOKENS"], macros["KDA_MANY_TURNS"]) == (tokens, many_turns)
    assert grid == COUNT * VALUE_HEADS
    state = {"pool": "state", "records": "records", "slots": "slots", "accepted": "accepted"}
    assert named(given, addresses) == TOKENS | state
    assert named(given, committed) == state
    assert constants.positions == fewer.positions == positions
    assert constants.record_position_stride == VALUE_HEADS * 384
    assert constants.flags & Flags.SOFTPLUS_GATE
    assert fewer.flags == Flags.SLOTS_64 | Flags.STATE_V_FIRST | VECTORS


@pytest.mark.parametrize(
    ("tokens", "positions", "chunk", "folds", "many_turns"),
    [
        (1, 8, "2", "8", "false"),
        (4, 8, "4", "8", "false"),
        (4, 12, "4", "16", "false"),
        (8, 16, "8", "16", "false"),
        (8, 24, "8", "24", "false"),
        (8, 40, "8", "8", "true"),
        (11, 22, "8", "8", "true"),
    ],
)
def test_deferred_states_take_the_chunk_of_the_segments_and_all_records_at_once(
    fake: Driver, tokens: int, positions: int, chunk: str, folds: str, many_turns: str
) -> None:
    segments = Segments.from_lengths([tokens] * COUNT)
    records, held = torch.zeros(9, positions, VALUE_HEADS, 384), torch.zeros(9, VALUE_HEADS, dtype=torch.int32)
    slots, accepted = torch.arange(COUNT), torch.zeros(COUNT, dtype=torch.int32)
    given = inputs(tokens * COUNT) | {"segments": segments, "slots": slots, "records": records, "accepted": accepted}
    rapidkda.verify(**given, held=held, backend="cuda")
    rapidkda.commit(
        state=given["state"],
        records=records,
        held=held,
        slots=slots,
        accepted=accepted,
        state_v_first=True,
        backend="cuda",
    )
    (verify, _, addresses, constants), (commit, _, committed, _) = fake.launched
    assert verify in steps.kernels()
    macros = dict(verify.macros)
    assert (macros["KDA_TOKENS"], macros["KDA_FOLDS"], macros["KDA_MANY_TURNS"]) == (chunk, folds, many_turns)
    assert macros["KDA_DEFERRED"] == dict(commit.macros)["KDA_DEFERRED"] == "true"
    assert addresses["held"] == committed["held"] == held.data_ptr()
    assert constants.positions == positions


@pytest.mark.parametrize("positions", [3, 8, 16])
def test_deferred_states_compile_nothing_after_the_first_step(fake: Driver, positions: int) -> None:
    """Whatever the lengths of later steps, and when requests leave."""
    records, held = torch.zeros(9, positions, VALUE_HEADS, 384), torch.zeros(9, VALUE_HEADS, dtype=torch.int32)
    kept = {"slots": torch.arange(COUNT), "records": records, "accepted": torch.zeros(COUNT, dtype=torch.int32)}
    loaded: set[compiler.KernelSource] = set()
    for tokens in range(1, positions + 1):
        given = inputs(tokens * COUNT) | {"segments": Segments.from_lengths([tokens] * COUNT)} | kept
        rapidkda.verify(**given, held=held, backend="cuda")
        loaded = loaded or set(fake.kernels.values())
    rapidkda.commit(state=given["state"], held=held, backend="cuda", **kept)
    launched = {kernel for kernel, *_ in fake.launched}
    assert launched <= loaded
    assert loaded <= set(steps.kernels())


def test_a_call_says_how_its_tensors_lie(fake: Driver) -> None:
    slots = torch.arange(6 * (COUNT + 1), dtype=torch.int32).view(COUNT + 1, 6)[1:, 1]
    accepted = torch.zeros(COUNT, dtype=torch.int64)
    segments = Segments.from_lengths([2] * COUNT)
    records = torch.zeros(9, 2, 3, VALUE_HEADS, 384)[:, 1]
    given = inputs(2 * COUNT) | {"segments": segments, "slots": slots, "records": records, "accepted": accepted}
    rapidkda.verify(**given, lower_bound=-5.0, backend="cuda")
    ((_, _, _, constants),) = fake.launched
    assert (constants.slot_stride, constants.accepted_stride, constants.positions) == (6, 1, 3)
    assert (constants.record_stride, constants.record_position_stride) == (6 * VALUE_HEADS * 384, VALUE_HEADS * 384)
    assert (constants.group, constants.tokens, constants.segments, constants.pool_rows) == (2, 2 * COUNT, COUNT, 9)
    wanted = Flags.ACCEPTED_64 | Flags.BOUNDED_GATE | Flags.BETA_LOGITS | Flags.L2_NORM | Flags.STATE_V_FIRST
    assert constants.flags == wanted | VECTORS


@pytest.mark.parametrize(
    ("name", "value", "lost"),
    [
        ("q", tensor(COUNT, HEADS, 128, past=2), Flags.VECTOR_INPUTS),
        ("k", tensor(COUNT, HEADS, 128, spare=2), Flags.VECTOR_INPUTS),
        ("g", tensor(COUNT, VALUE_HEADS, 128, dtype=torch.float32, past=2), Flags.VECTOR_INPUTS),
        ("q", tensor(COUNT, HEADS, 128, past=4, spare=4), 0),
        ("v", tensor(COUNT, VALUE_HEADS, 128, past=1, spare=1), 0),
        ("out", tensor(COUNT, VALUE_HEADS, 128, past=1, spare=1), 0),
        ("state", tensor(9, VALUE_HEADS, 128, 128, past=4), Flags.VECTOR_STATES),
        ("state", tensor(9, VALUE_HEADS, 128, 128, spare=4), Flags.VECTOR_STATES),
        ("state", tensor(9, VALUE_HEADS, 128, 128, spare=8), 0),
        ("state", tensor(9, VALUE_HEADS, 128, 128, dtype=torch.float32, past=1), Flags.VECTOR_STATES),
        ("records", tensor(9, 2, VALUE_HEADS, 384, dtype=torch.float32, past=1), Flags.VECTOR_RECORDS),
        ("records", tensor(9, 2, VALUE_HEADS, 384, dtype=torch.float32, spare=2), Flags.VECTOR_RECORDS),
        ("records", tensor(9, 2, VALUE_HEADS, 384, dtype=torch.float32, spare=4), 0),
    ],
)
def test_accesses_are_vectors_where_all_of_them_are_aligned(fake: Driver, name: str, value: Tensor, lost: int) -> None:
    """Also for the second call of a kind, whose tensors lie elsewhere."""
    aligned = tensor(*value.shape, dtype=value.dtype, spare=value.stride(0) - value[0].numel())
    for one in (aligned, value, aligned):
        verify(COUNT, **{name: one})
    first, second, third = (constants.flags & VECTORS for *_, constants in fake.launched)
    assert second == VECTORS & ~lost
    assert first == third
    assert first & second == second


def test_states_by_channel_are_never_vectors(fake: Driver) -> None:
    verify(COUNT, state_v_first=False)
    assert fake.launched[0][3].flags & (VECTORS | Flags.STATE_V_FIRST) == VECTORS & ~Flags.VECTOR_STATES


def test_the_grid_is_one_block_a_multiprocessor_at_most(fake: Driver) -> None:
    verify(90)
    assert fake.launched[0][1] == 132
