"""What reaches the driver, without one: a launch from packed memory is the launch that Triton would make."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the package triton", minversion="3.6")

import triton_calls as calls

from rapidkda.backends import driver
from rapidkda.backends.triton import TritonBackend, chunk, config, conv, launch, norm, pair, plan, prefill, recurrent
from rapidkda.device import Device
from rapidkda.segments import Segments

BACKEND = TritonBackend()
LAUNCHERS = [
    *(
        x
        for module in (prefill, recurrent, pair, chunk, conv, norm)
        for x in vars(module).values()
        if isinstance(x, launch.Launcher)
    ),
    prefill.sm90_prepare(),
    prefill.sm90_scan(),
    recurrent.sm90_steps(),
    recurrent.sm90_replays(),
]
SIZES = {"i32": "<i", "i64": "<q", "fp32": "<f"}

Seen = tuple[int, tuple[int, ...], list[Any]]  # function, grid, parameters


class Machine:
    """Stands in for Triton's compiler and for the driver, and keeps what is launched through each."""

    def __init__(self) -> None:
        self.through_triton: list[Seen] = []
        self.through_driver: list[Seen] = []
        self.signatures: dict[int, list[str]] = {}
        self.overlaps: dict[int, bool] = {}
        self.numbers = itertools.count(100)

    def kernel(self, original: Any) -> Any:
        """A kernel that compiles at once, with the signature that Triton derives from the arguments."""
        machine = self

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
                def call(*arguments: Any, **options: Any) -> Any:
                    compiled = self.warmup(*arguments, grid=grid, **options)
                    machine.through_triton.append((compiled.function, grid, machine.passed(compiled, arguments)))
                    return compiled

                return call

            def warmup(self, *arguments: Any, grid: tuple[int, ...], num_warps: int, **options: Any) -> Any:
                assert len(arguments) == len(original.params)
                types = [_type(parameter, x) for parameter, x in zip(original.params, arguments)]
                function = next(machine.numbers)
                machine.signatures[function] = types
                machine.overlaps[function] = options.get("launch_pdl", False)
                return SimpleNamespace(
                    function=function,
                    run=None,
                    src=SimpleNamespace(signature=dict(enumerate(types))),
                    metadata=SimpleNamespace(
                        target=SimpleNamespace(backend="cuda"),
                        num_warps=num_warps,
                        num_ctas=1,
                        shared=num_warps,
                        global_scratch_size=0,
                        profile_scratch_size=0,
                        launch_cooperative_grid=False,
                        launch_pdl=options.get("launch_pdl", False),
                    ),
                )

        return Kernel()

    def passed(self, compiled: Any, arguments: tuple[Any, ...]) -> list[Any]:
        """The arguments that the kernel has parameters for."""
        types = self.signatures[compiled.function]
        values = [x for kind, x in zip(types, arguments) if kind != "constexpr"]
        return [x.data_ptr() if isinstance(x, Tensor) else _rounded(x) for x in values]

    def launch(self, configuration_at: int, function: int, pointers_at: int, extra: None) -> int:
        told = driver._Configuration.from_address(configuration_at)
        types = [kind for kind in self.signatures[function] if kind != "constexpr"]
        pointers = (ctypes.c_void_p * (len(types) + 2)).from_address(pointers_at)
        values: list[Any] = []
        for kind, pointer in zip([*types, "*", "*"], pointers):
            layout = struct.Struct("<Q" if kind.startswith("*") else SIZES[kind])
            values += layout.unpack(ctypes.string_at(pointer, layout.size))
        assert values[-2:] == [0, 0]  # Triton's scratch
        assert tuple(told.block) == (32 * told.shared_bytes, 1, 1)
        assert told.stream == 5
        attribute = driver._Attribute.from_address(told.attributes) if told.attribute_count else None
        assert self.overlaps[function] == (attribute is not None)
        assert attribute is None or (attribute.id, attribute.value[0]) == (6, 1)
        self.through_driver.append((function, tuple(told.grid), values[:-2]))
        return 0


def _type(parameter: Any, value: Any) -> str:
    if parameter.is_constexpr or value is None:
        return "constexpr"
    if isinstance(value, Tensor):
        return f"*{value.dtype}"
    if isinstance(value, float):
        return "fp32"
    if value == 1 and not parameter.do_not_specialize:
        return "constexpr"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _rounded(value: float) -> Any:
    return struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launcher, "kernel", made.kernel(launcher.kernel))
        monkeypatch.setattr(launcher, "compiled", {})
    bind = launch.Launcher.bind
    monkeypatch.setattr(launch.Launcher, "bind", lambda self, _, *rest, **named: bind(self, GPU, *rest, **named))
    monkeypatch.setattr(driver, "_entry", lambda name: made.launch)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    monkeypatch.setattr(config, "machine", lambda device: config.Machine.of(Device("nvidia", "H200", (9, 0)), 132))
    return made


GPU = torch.device("cuda", 0)
WORKSPACE = torch.empty(1 << 26, dtype=torch.uint8)
CALLS: dict[str, Callable[[], Any]] = {
    "prefill": lambda: calls.prefill([40, 20], export=True, heads=8),
    "prefill without a gate": lambda: calls.prefill([40], gate="log_decay"),
    "decode": lambda: calls.decode(2),
    "decode of bfloat16 states": lambda: calls.decode(2, state_dtype=torch.bfloat16),
    "decode without a gate": lambda: calls.decode(2, gate="log_decay"),
    "verify": lambda: calls.verify(2, replay=False),
    "verify by replay": lambda: calls.verify(2, replay=True),
    "verify by replay of a chunk": lambda: calls.verify(2, replay=True, most=4),
    "verify of deferred states": lambda: calls.verify(2, replay=True, rows=8),
    "verify by replay in float32": lambda: calls.verify(2, replay=True, dtype=torch.float32),
    "verify of deferred states in float32": lambda: calls.verify(2, replay=True, rows=8, dtype=torch.float32),
    "commit": lambda: calls.commit(2),
    "commit of deferred states": lambda: calls.commit(2, rows=8),
    "conv": lambda: calls.conv([150, 50]),
    "conv of one token": lambda: calls.conv([1, 1]),
    "norm": lambda: calls.norm(5),
}


def run(name: str, call: Any) -> None:
    if hasattr(call, "workspace"):
        call.workspace = WORKSPACE
    getattr(BACKEND, name.split()[0])(call)


in_both_forms = pytest.mark.parametrize("cut", [plan.NO_CUT, plan.Cut(3, 2, later=2, middle=1)], ids=["whole", "parts"])


@in_both_forms
@pytest.mark.parametrize("name", CALLS)
def test_known_launches_are_those_of_triton(
    name: str, cut: plan.Cut, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call goes through Triton, the second through the driver: the same kernels, grids and parameters."""
    monkeypatch.setattr(plan, "cut", lambda *arguments: cut)
    call = CALLS[name]()
    run(name, call)
    assert machine.through_triton
    assert not machine.through_driver
    run(name, call)
    assert machine.through_driver == machine.through_triton


@in_both_forms
@pytest.mark.parametrize("name", CALLS)
def test_launches_from_addresses_are_those_of_the_call(
    name: str, cut: plan.Cut, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend's `Repeat`: the same launches again, from nothing but addresses, those of another call too."""
    monkeypatch.setattr(plan, "cut", lambda *arguments: cut)
    call = CALLS[name]()
    run(name, call)
    assert call.repeat is not None
    assert call.repeat.launch(tuple([x.data_ptr() for x in call.repeat.tensors]))
    assert machine.through_driver == machine.through_triton
    assert {x.data_ptr() for x in call.repeat.aligned} <= {x.data_ptr() for x in call.repeat.tensors}
    with monkeypatch.context() as patch:
        patch.setattr(launch.knobs.runtime, "launch_enter_hook", lambda metadata: None)
        assert not call.repeat.launch(tuple([x.data_ptr() for x in call.repeat.tensors]))
    other = CALLS[name]()
    other.memo = call.memo
    run(name, other)
    machine.through_driver.clear()
    repeat, addresses = call.repeat, tuple([x.data_ptr() for x in other.repeat.tensors])
    assert repeat.launch(addresses)
    wanted, machine.through_driver = machine.through_driver, []
    run(name, other)
    assert machine.through_driver == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", [1, 8, 12])
def test_deferred_requests_of_another_length_find_their_kernels(
    machine: Machine, first: int, dtype: torch.dtype
) -> None:
    run("verify", calls.verify(2, True, first, 16, dtype=dtype))
    machine.through_triton.clear()
    for batch, most in itertools.product((2, 20), (1, 2, 3, 4, 5, 8, 9, 12)):
        run("verify", calls.verify(batch, True, most, 16, dtype=dtype))
    assert not machine.through_triton
    assert len(machine.through_driver) == 16


def test_kernels_that_overlap_are_launched_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    where = config.machine
    monkeypatch.setattr(config, "machine", lambda device: replace(where(device), overlap=True))
    call = CALLS["decode"]()
    for _ in range(2):
        run("decode", call)
    assert machine.through_driver == machine.through_triton
    assert any(machine.overlaps[function] for function, _, _ in machine.through_driver)


@pytest.mark.parametrize("name", CALLS)
def test_another_kind_of_call_finds_the_kernels_of_the_first(name: str, machine: Machine) -> None:
    first, second = CALLS[name](), CALLS[name]()
    run(name, first)
    compiled = len(machine.signatures)
    run(name, second)
    run(name, second)
    assert len(machine.signatures) == compiled
    assert len(machine.through_driver) == 2 * len(machine.through_triton)


def test_a_norm_of_more_segments_than_a_second_axis_has_is_launched(machine: Machine) -> None:
    """Only the first axis of a grid goes beyond 65,535."""
    call = replace(calls.norm(70000), segments=Segments.equal(70000, 1))
    run("norm", call)
    ((_, grid, _),) = machine.through_triton
    assert grid == (70000, 1, 1)


def test_hooks_of_triton_see_the_launches(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS["norm"]()
    run("norm", call)
    ran: list[Any] = []
    compiled = next(iter(norm._norm.compiled.values())).kernel
    compiled.run, compiled.packed_metadata = lambda *arguments: ran.append(arguments), None
    call.memo.clear()
    run("norm", call)
    assert not ran
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.knobs.runtime, "launch_enter_hook", lambda metadata: None)
        run("norm", call)
    assert len(ran) == 1
    assert [x for x in ran[0] if isinstance(x, int) and x > 2**32] == [
        x.data_ptr() for x in (call.x, call.z, call.weight, call.out)
    ]
    run("norm", call)
    assert len(ran) == 1
