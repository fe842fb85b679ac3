"""What reaches the driver, without one: a known kind of call launches what a new one does."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import rapidkda
from rapidkda import Checkpoints, Segments
from rapidkda.backends import driver
from rapidkda.backends.cuda import CudaBackend, compiler
from rapidkda.backends.cuda.host import fuse, neighbours, params, prefill, tensor_map
from rapidkda.backends.cuda.host.plan import Plan
from rapidkda.ops import kinds
from rapidkda.problem import FusedConv, FusedNorm

HEADS = 2
LENGTHS = ([40, 24], [24, 40], [64], [32, 32], [16, 16, 16, 16], [24, 16, 24])

PLANS = {
    0: Plan("whole", 1, 0.0, ()),
    16: Plan("whole", 1, 0.0, ()),
    24: Plan("pair", 1, 0.0, ()),
    32: Plan("parallel", 2, 0.0, ()),
    40: Plan("whole", 1, 0.0, ()),
    64: Plan("parallel", 3, 0.0, ()),
}  # by the greatest length: what decides a plan is part of a kind
LAUNCHES = {"whole": 1, "pair": 1, "parallel": 2}

Launch = tuple[Any, ...]


class Driver:
    """Takes launches and tells what it was told. Addresses are named after the arguments of the call."""

    def __init__(self) -> None:
        self.launched: list[Launch] = []
        self.given: dict[int, str] = {}
        self.stream = 0

    def launch(self, configuration_at: int, function: int, pointers_at: int, extra: None) -> int:
        told = driver._Configuration.from_address(configuration_at)
        start = ctypes.c_void_p.from_address(pointers_at).value
        assert start is not None
        parameter = ctypes.string_at(start, params.SIZE)
        at = dict(zip(params.ADDRESSES, struct.unpack_from(f"<{len(params.ADDRESSES)}Q", parameter, 512)))
        assert at["out"] % 16 == 0
        after = 512 + 8 * len(params.ADDRESSES)
        flags = params.Constants._make(
            params._CONSTANTS.unpack_from(parameter, after)[: len(params.Constants._fields)]
        ).flags
        assert not flags & params.Flags.VECTOR_STATES or not (at["initial"] | at["checkpoint_pool"]) % 8
        self.launched.append(
            (
                function,
                tuple(told.grid),
                tuple(told.block),
                told.shared_bytes,
                told.stream,
                told.attribute_count,
                parameter[:512],
                [self.given.get(address, "new" if address else "absent") for address in at.values()],
                parameter[after:],
            )
        )
        return 0

    def encode(self, address: int, shape: Any, strides: Any, is_float: bool, blocks: int, rows: int) -> bytes | None:
        if address % 16 or any(stride % 8 for stride in strides[:2]):
            return None
        about = self.given.get(address, "new"), tuple(shape), strides[:2], is_float, blocks, rows
        return repr(about).encode().ljust(128)[:128]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    told = Driver()
    monkeypatch.setattr(driver, "_entry", lambda name: told.launch)
    monkeypatch.setattr(compiler, "load", _loaded)
    monkeypatch.setattr(prefill, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(prefill, "plan", lambda call, sms: PLANS[call.segments.max_length])
    monkeypatch.setattr(tensor_map, "_encode", told.encode)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: told.stream, raising=False)
    monkeypatch.setattr(CudaBackend, "unmet", lambda self, request: [])
    kinds.forget()
    rapidkda.dispatch.resolve_cached.cache_clear()
    yield told
    kinds.forget()
    rapidkda.dispatch.resolve_cached.cache_clear()


def _loaded(kernel: compiler.KernelSource, device: int) -> compiler.LoadedKernel:
    function = sum(str(kernel).encode()) * 1000 + device
    return compiler.LoadedKernel(function, 160, len(kernel.macros), 1 + ("kPair" in str(kernel)), None)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, past: int = 0, spare: int = 0) -> Tensor:
    """Zeros that start `past` elements after a multiple of 64 bytes, with `spare` elements after each row."""
    rows, row = shape[0], torch.Size(shape[1:]).numel()
    flat = torch.zeros(rows * (row + spare) + 64 + past, dtype=dtype)
    start = -flat.data_ptr() % 64 // dtype.itemsize + past
    strides = torch.empty(shape).stride()
    return torch.as_strided(flat, shape, (row + spare, *strides[1:]), start)


_bytes = torch.empty(1 << 25, dtype=torch.uint8)
WORKSPACE = _bytes[-_bytes.data_ptr() % 256 :]
PLAIN: dict[str, Any] = {
    "lengths": [64],
    "known lengths": True,
    "gate dtype": torch.bfloat16,
    "beta dtype": torch.bfloat16,
    "state dtype": torch.float32,
    "slot dtype": torch.int32,
    "flag dtype": None,
    "bounded": True,
    "v first": True,
    "reads": False,
    "exports": False,
    "scratch": False,
    "q": 0,
    "out": 0,
    "state": 0,
}
DRAWS = st.fixed_dictionaries(
    {
        "lengths": st.sampled_from(LENGTHS),
        "known lengths": st.booleans(),
        "gate dtype": st.sampled_from([torch.bfloat16, torch.float32]),
        "beta dtype": st.sampled_from([torch.bfloat16, torch.float32]),
        "state dtype": st.sampled_from([torch.bfloat16, torch.float32]),
        "slot dtype": st.sampled_from([torch.int32, torch.int64]),
        "flag dtype": st.sampled_from([torch.bool, torch.int32, None]),
        "bounded": st.booleans(),
        "v first": st.booleans(),
        "reads": st.booleans(),
        "exports": st.booleans(),
        "scratch": st.booleans(),
        "q": st.sampled_from([0, 8, 4]),  # elements between rows
        "out": st.sampled_from([0, 8, 1]),
        "state": st.sampled_from([0, 1, 2]),
        "starts": st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 8])] * 3), min_size=3, max_size=3),
        "stream": st.integers(1, 9),
    }
)


def arguments(draw: dict[str, Any], starts: tuple[int, int, int] = (0, 0, 0)) -> dict[str, Any]:
    """A call; `starts` of q, out and the pool, elements past an aligned address, are what calls of a kind differ in."""
    lengths: Sequence[int] = draw["lengths"]
    count, state = len(lengths), draw["state dtype"]
    segments = Segments.from_lengths(lengths)
    if not draw["known lengths"]:
        segments = Segments(segments.first_token, segments.length, max(lengths))
    flags = draw["flag dtype"]
    q_start, out_start, state_start = starts
    result = {
        "q": tensor(64, HEADS, 128, past=q_start, spare=draw["q"]),
        "k": tensor(64, HEADS, 128),
        "v": tensor(64, HEADS, 128),
        "g": tensor(64, HEADS, 128, dtype=draw["gate dtype"]),
        "beta": tensor(64, HEADS, dtype=draw["beta dtype"]),
        "A_log": tensor(HEADS, dtype=torch.float32),
        "dt_bias": tensor(HEADS, 128, dtype=torch.float32),
        "lower_bound": -5.0 if draw["bounded"] else None,
        "out": tensor(64, HEADS, 128, past=out_start, spare=draw["out"]),
        "segments": segments,
        "state": tensor(5, HEADS, 128, 128, dtype=state, past=state_start, spare=draw["state"]),
        "slots": torch.arange(count, dtype=draw["slot dtype"]),
        "read_slots": torch.arange(count, dtype=torch.int32) if draw["reads"] else None,
        "has_initial_state": None if flags is None else torch.ones(count, dtype=flags),
        "state_v_first": draw["v first"],
        "backend": "cuda",
    }
    if draw["exports"]:
        offsets = [(n, 16, 3 + n) for n, length in enumerate(lengths[:1]) if length >= 16]
        result["checkpoints"] = Checkpoints.build(offsets, count)
        result["checkpoint_pool"] = tensor(5, HEADS, 128, 128, dtype=state)
    if draw["scratch"]:
        result["workspace"] = WORKSPACE
    return result


def launched(fake: Driver, given: dict[str, Any]) -> list[Launch]:
    fake.launched = []
    mine = f" of {id(given)}"
    fake.given = {x.data_ptr(): name + mine for name, x in given.items() if isinstance(x, Tensor)}
    segments, checkpoints = given["segments"], given.get("checkpoints")
    fake.given |= {segments.first_token.data_ptr(): "first_token", segments.length.data_ptr(): "length"}
    if checkpoints is not None:
        fake.given |= {getattr(checkpoints, name).data_ptr(): name for name in ("begin", "offset", "slot")}
    rapidkda.prefill(**given)
    return fake.launched


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(draws=st.lists(DRAWS, min_size=1, max_size=3), order=st.lists(st.integers(0, 8), min_size=3, max_size=12))
def test_known_kinds_launch_what_new_ones_do(fake: Driver, draws: list[dict[str, Any]], order: list[int]) -> None:
    """A few calls in random order, some of one kind on tensors that are aligned otherwise."""
    kinds.forget()
    calls = [arguments(draw, starts) for draw in draws for starts in draw["starts"]]
    for n in order:
        n %= len(calls)
        draw, given = draws[n // 3], calls[n]
        fake.stream = draw["stream"]
        seen = launched(fake, given)
        known, latest = dict(kinds._known), dict(kinds._latest)
        kinds.forget()
        wanted = launched(fake, given)
        kinds._known.update(known)
        kinds._latest.update(latest)
        assert seen == wanted
        assert len(seen) == LAUNCHES[PLANS[max(draw["lengths"])].form]
        assert {launch[4] for launch in seen} == {draw["stream"]}
        for kind in kinds._known.values():  # maps of copies die with them
            assert not any(b"new" in b"".join(maps) for maps in kind.memo["cuda"]._maps.values())


def test_an_output_that_kernels_cannot_address_is_written_by_way_of_a_copy() -> None:
    def out(tokens: int, stride: int) -> torch.Tensor:
        return torch.empty_strided((tokens, 2, 128), (stride, 128, 1), dtype=torch.bfloat16, device="meta")

    far = 1 << 27
    copied = {stride: prefill._strided_rows(out(16, stride)) for stride in (256, far - 8, 260, far)}
    assert copied == {256: False, far - 8: False, 260: True, far: True}
    assert not prefill._strided_rows(out(1, 2 * far))


def test_tensor_maps_that_are_kept_are_bounded(fake: Driver) -> None:
    given = arguments(PLAIN)
    for _ in range(3 * prefill._MOST_MAPS):
        rapidkda.prefill(**given | {"q": tensor(64, HEADS, 128)})
    (kind,) = kinds._known.values()
    assert 0 < len(kind.memo["cuda"]._maps) <= prefill._MOST_MAPS


def test_threads_never_share_the_memory_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that starts while another of its kind is under way packs its addresses elsewhere."""
    depth = 0
    seen: list[tuple[int, int]] = []

    def launch(configuration_at: int, function: int, pointers_at: int, extra: None) -> int:
        nonlocal depth
        start = ctypes.c_void_p.from_address(pointers_at).value
        assert start is not None
        depth += 1
        mine = depth
        seen.append((configuration_at, start))
        if depth < 3:
            launches(1, [depth + 1])
        assert ctypes.c_uint64.from_address(start).value == mine
        return 0

    monkeypatch.setattr(driver, "_entry", lambda name: launch)
    shape = driver.Shape(7, (1, 1, 1), 32, 0)
    launches = driver.Launches(0, [(shape, (0, 8))], bytes(16), struct.Struct("<Q"))
    for _ in range(2):
        depth = 0
        launches(1, [1])
        assert len(launches._free) == 3
    assert len(seen) == 6
    assert len(set(seen)) == 3  # the second time in the memory of the first


def test_fields_are_filled_in_their_order(fake: Driver) -> None:
    """Every tensor of a call goes into the field of its name."""
    given = arguments(PLAIN | {"lengths": [24, 16, 24], "reads": True, "flag dtype": torch.bool, "exports": True})
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaBackend, "prefill", lambda self, call: calls.append(call))
        rapidkda.prefill(**given)
    call = replace(calls[0], final=torch.zeros_like(given["state"]))
    assert call.checkpoints is not None
    named = {
        "beta": call.tokens.beta,
        "A_log": call.tokens.gate.A_log,
        "dt_bias": call.tokens.gate.dt_bias,
        "out": call.out,
        "initial": call.initial,
        "final": call.final,
        "checkpoint_pool": call.checkpoint_pool,
        "first_token": call.segments.first_token,
        "length": call.segments.length,
        "read_slots": call.read_slots,
        "write_slots": call.write_slots,
        "has_initial": call.has_initial_state,
        "checkpoint_begin": call.checkpoints.begin,
        "checkpoint_offset": call.checkpoints.offset,
        "checkpoint_slot": call.checkpoints.slot,
    }
    fake.given = {x.data_ptr(): name for name, x in named.items() if x is not None}
    assert len(fake.given) == len(named)
    prefill.run(call)
    assert fake.launched[0][7] == [*named, *["absent"] * 3]


def test_fields_of_neighbours_are_filled_in_their_order(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(PLAIN | {"lengths": [40, 24]})
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaBackend, "prefill", lambda self, call: calls.append(call))
        rapidkda.prefill(**given)
    call = calls[0]
    x = tensor(64, 3 * HEADS * 128)
    pool = torch.zeros(9, 3, 3 * HEADS * 128, dtype=torch.bfloat16)
    rows = torch.zeros(2, dtype=torch.int32)
    weight = tensor(3 * HEADS * 128, 4, dtype=torch.float32)
    call.conv = FusedConv(x, weight, pool, True, rows, rows + 1, pool.clone())
    call.norm = FusedNorm(tensor(64, HEADS, 128), torch.zeros(128), 1e-5, "sigmoid")
    fields = ("x", "weight", "pool", "checkpoint_pool", "read_slots", "accepted")
    values = [*(getattr(call.conv, name) for name in fields), call.norm.weight]
    fake.given = {value.data_ptr(): name for value, name in zip(values, (*fields, "norm"), strict=True)}
    seen = []
    maps_of_the_first = prefill._maps(call, [])

    def launch(configuration_at: int, function: int, pointers_at: int, extra: None) -> int:
        first, second = (ctypes.c_void_p * 2).from_address(pointers_at)
        assert first is not None
        assert second is not None
        assert first - second == neighbours.SIZE
        seen.append(ctypes.string_at(second, neighbours.SIZE))
        assert ctypes.string_at(first, 512) == maps_of_the_first
        assert ctypes.c_uint64.from_address(first + 512).value == call.tokens.beta.data_ptr()
        return 0

    monkeypatch.setattr(driver, "_entry", lambda name: launch)
    prefill.run(call)
    assert len(seen) == 2  # the prefill, the histories
    assert seen[0] == seen[1]
    addresses = struct.unpack_from("<7Q", seen[0], neighbours.MAPS_AT + 512)
    assert [fake.given.get(address, "new") for address in addresses] == [*fields, "norm"]
    maps = [seen[0][at : at + 128].decode().strip() for at in range(128, 640, 128)]
    assert [text.rsplit(", ", 2)[1:] for text in maps] == [*[["2", "3)"]] * 3, ["2", "16)"]]


def layer_arguments() -> dict[str, Any]:
    plain = arguments(PLAIN | {"lengths": [40, 24], "reads": True})
    given = {name: plain[name] for name in ("beta", "A_log", "dt_bias", "lower_bound", "out", "segments", "state")}
    return given | {
        "x": tensor(64, 3 * HEADS * 128 + 8)[:, 8:],
        "g": plain["g"],
        "conv_weight": tensor(3 * HEADS * 128, 4, dtype=torch.float32),
        "conv_state": tensor(9, 3, 3 * HEADS * 128),
        "channels_last": True,
        "z": tensor(64, HEADS, 128),
        "norm_weight": tensor(128, dtype=torch.float32),
        "slots": plain["slots"],
        "read_slots": plain["read_slots"],
        "conv_read_slots": plain["read_slots"].clone(),
        "backend": "cuda",
    }


@pytest.fixture
def layers(fake: Driver, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Both parameters of what layers launch, whose neighbours are all fused."""
    seen: list[bytes] = []

    def launch(configuration_at: int, function: int, pointers_at: int, extra: None) -> int:
        second = (ctypes.c_void_p * 2).from_address(pointers_at)[1]
        assert second is not None
        seen.append(ctypes.string_at(second, neighbours.SIZE + params.SIZE))
        return 0

    monkeypatch.setattr(driver, "_entry", lambda name: launch)
    monkeypatch.setattr(tensor_map, "_encode", lambda *about: repr(about).encode().ljust(128)[:128])
    monkeypatch.setattr(fuse, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(fuse, "plan_neighbours", lambda *about: (("conv", "norm"), {}))
    return seen


def test_known_layers_launch_what_new_ones_do(layers: list[bytes]) -> None:
    """To the byte."""
    seen = layers
    calls = [layer_arguments() for _ in range(3)]
    wanted = []
    for call in calls:
        kinds.forget()
        seen.clear()
        rapidkda.prefill_layer(**call)
        wanted.append(list(seen))
    assert len({one[0] for one in wanted}) == 3
    kinds.forget()
    for n in (0, 1, 2, 0, 2):
        seen.clear()
        rapidkda.prefill_layer(**calls[n])
        assert seen == wanted[n]
    (kind,) = kinds._known.values()
    assert kind.again is not None


@pytest.mark.parametrize("known", [False, True])
def test_weights_off_their_alignment_are_copied(layers: list[bytes], known: bool) -> None:
    """The kernel reads the four of a channel at once. Copies are never taken for the caller's tensor."""
    call = layer_arguments()
    if known:
        rapidkda.prefill_layer(**call)
    for past in (1, 2, 3, 0):
        call["conv_weight"] = tensor(3 * HEADS * 128, 4, dtype=torch.float32, past=past)
        assert call["conv_weight"].data_ptr() % 16 == 4 * past
        layers.clear()
        rapidkda.prefill_layer(**call)
        addresses = [struct.unpack_from("<7Q", one, neighbours.MAPS_AT + 512)[1] for one in layers]
        assert len(addresses) == 2
        assert not any(address % 16 for address in addresses)
        assert (set(addresses) == {call["conv_weight"].data_ptr()}) == (past == 0)


@pytest.mark.parametrize("known", [False, True])
def test_fused_layers_check_the_name_of_a_backend_that_they_do_not_need(layers: list[bytes], known: bool) -> None:
    call = layer_arguments()
    if known:
        rapidkda.prefill_layer(**call)
    layers.clear()
    with pytest.raises(ValueError, match=r"neighbour_backend must be one of .* got 'fastest'"):
        rapidkda.prefill_layer(**call, neighbour_backend="fastest")
    assert not layers
    rapidkda.prefill_layer(**call, neighbour_backend="triton")
    assert len(layers) == 2


def test_a_layer_without_tokens_is_launched(layers: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """No map can be made of no tokens; the histories and states of empty segments may become zero all the same."""

    def encode(address: int, shape: torch.Size, *about: Any) -> bytes:
        raise RuntimeError(f"CUDA driver call failed: {list(shape)}")

    monkeypatch.setattr(tensor_map, "_encode", encode)
    full = layer_arguments()
    call = full | {name: full[name][:0] for name in ("x", "g", "beta", "z", "out")}
    for _ in range(2):  # of a new kind, of a known one
        layers.clear()
        rapidkda.prefill_layer(**call | {"segments": Segments.from_lengths([0, 0])})
        assert len(layers) == 2
        assert not any(one[neighbours.MAPS_AT : neighbours.MAPS_AT + 512].strip(b"\0") for one in layers)


@pytest.mark.parametrize(("version", "overlaps"), [(12020, False), (12030, True), (13000, True)])
def test_launches_overlap_where_the_driver_has_graphs_of_such(
    version: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def cuDriverGetVersion(self, to: Any) -> int:
            to._obj.value = version
            return 0

    told: list[int] = []

    def launch(configuration_at: int, function: int, pointers_at: int, extra: None) -> int:
        told.append(driver._Configuration.from_address(configuration_at).attribute_count)
        return 0

    monkeypatch.setattr(driver, "_library", Library)
    monkeypatch.setattr(driver, "_entry", lambda name: launch)
    driver.may_overlap.cache_clear()
    try:
        shapes = [driver.Shape(1, (1, 1, 1), 32, 0, overlap=overlap) for overlap in (True, False)]
        driver.Launches(0, [(shape, (0,)) for shape in shapes], bytes(8), struct.Struct("q"))(7, (3,))
    finally:
        driver.may_overlap.cache_clear()
    assert told == [int(overlaps), 0]


def test_a_failed_launch_is_told_by_the_name_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def cuGetErrorName(status: int, name: Any) -> int:
            name._obj.value = b"CUDA_ERROR_LAUNCH_FAILED"
            return 0

    monkeypatch.setattr(driver, "_library", Library)
    monkeypatch.setattr(driver, "_entry", lambda name: lambda *arguments: 719)
    launches = driver.Launches(0, [(driver.Shape(7, (1, 1, 1), 32, 0), (0,))], bytes(8), struct.Struct("<Q"))
    with pytest.raises(RuntimeError, match="CUDA driver call failed: CUDA_ERROR_LAUNCH_FAILED"):
        launches(1, [0])


def test_the_first_launch_of_a_thread_enters_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    monkeypatch.setattr(driver, "_enter_context", entered.append)
    monkeypatch.setattr(driver, "_entry", lambda name: lambda *arguments: 0 if entered else 201)
    launches = driver.Launches(3, [(driver.Shape(7, (1, 1, 1), 32, 0), (0,))], bytes(8), struct.Struct("<Q"))
    launches(1, [0])
    assert entered == [3]
