"""Every kernel compiles for every target, within the target's shared memory; a new length compiles nothing new."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton", minversion="3.6")

import triton_calls as calls
from triton_targets import TARGETS, compiling, stack_bytes

from rapidkda.backends.triton import TritonBackend, config, launch, plan

BACKEND = TritonBackend()
CUT = plan.Cut(3, 2, later=2, middle=1)


def launch_everything() -> None:
    """Every kernel and every pass of the scan."""
    BACKEND.prefill(calls.prefill([40, 20], export=True, heads=8))
    with mock.patch.object(plan, "cut", return_value=CUT):
        BACKEND.prefill(calls.prefill([40, 20]))
    with mock.patch.object(plan, "shares", return_value=5):
        BACKEND.prefill(calls.prefill([40, 20]))
    BACKEND.prefill(calls.prefill([40], gate="log_decay"))  # without gate parameters
    BACKEND.decode(calls.decode(2, gate="log_decay"))
    BACKEND.decode(calls.decode(2))
    BACKEND.decode(calls.decode(2, torch.bfloat16))
    BACKEND.verify(calls.verify(2, replay=False))
    BACKEND.verify(calls.verify(2, replay=True))
    BACKEND.verify(calls.verify(2, replay=True, most=8))
    BACKEND.verify(calls.verify(20, replay=True, most=4))
    BACKEND.verify(calls.verify(2, replay=True, rows=8))
    BACKEND.verify(calls.verify(2, replay=True, most=8, rows=16))
    if config.machine(torch.device("cpu")).gluon:  # then the kernels before are in Gluon
        BACKEND.verify(calls.verify(2, replay=True, dtype=torch.float32))
        BACKEND.verify(calls.verify(2, replay=True, most=8, dtype=torch.float32))
    BACKEND.commit(calls.commit(2))
    BACKEND.commit(calls.commit(2, rows=8))
    BACKEND.conv(calls.conv([150, 50]))
    BACKEND.conv(calls.conv([1, 1]))
    BACKEND.conv(calls.conv([3, 2], keep_all=True))
    BACKEND.norm(calls.norm(5))


KERNELS = {
    "tiles_kernel",
    "prepare_kernel",
    "scan_kernel",
    "compose_kernel",
    "step_kernel",
    "pair_kernel",
    "chunk_kernel",
    "commit_kernel",
    "conv_kernel",
    "norm_kernel",
}
GLUON_KERNELS = KERNELS | {"replay_kernel"}  # those that have no portable namesake too


@pytest.mark.parametrize("name", TARGETS)
def test_every_kernel_compiles(name: str) -> None:
    with compiling(name) as kernels:
        launch_everything()
    assert {kernel.metadata.name for kernel in kernels} == (GLUON_KERNELS if name == "sm_90" else KERNELS)
    for kernel in kernels:
        assert kernel.metadata.shared <= TARGETS[name].shared, kernel.metadata.name
        assert kernel.asm["hsaco" if name.startswith("gfx") else "cubin"]


@pytest.mark.parametrize("name", ["sm_89", "gfx942"])
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "dtype"), [(256, 256, torch.bfloat16), (256, 64, torch.float32), (64, 128, torch.float16)]
)
def test_every_head_size_fits_the_smallest_shared_memory(
    name: str, key_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    options = {"key_dim": key_dim, "value_dim": value_dim, "dtype": dtype, "gate": "bounded"}
    with compiling(name) as kernels:
        BACKEND.prefill(calls.prefill([40], torch.bfloat16, **options))
        BACKEND.verify(calls.verify(2, replay=True, most=8, **options))
        BACKEND.verify(calls.verify(2, replay=True, most=8, rows=16, **options))
    assert max(kernel.metadata.shared for kernel in kernels) <= TARGETS[name].shared


def test_a_new_length_or_batch_compiles_nothing() -> None:
    with compiling("sm_90") as kernels:
        BACKEND.prefill(calls.prefill([64]))
        BACKEND.prefill(calls.prefill([4000]))  # long enough to be cut
        BACKEND.prefill(calls.prefill([2000] * 18))  # so many chains that programs share them
        BACKEND.decode(calls.decode(1))
        for batch in (1, 17):  # so many programs that they are smaller
            BACKEND.verify(calls.verify(batch, replay=True))
            BACKEND.verify(calls.verify(batch, replay=True, most=4))
            for rows in (8, 12):
                BACKEND.verify(calls.verify(batch, replay=True, most=4, rows=rows))
        BACKEND.conv(calls.conv([64, 64]))
        warm = {id(kernel) for kernel in kernels}
        for lens in ([1], [65, 3], [700], [16] * 7, [1900] * 18):
            BACKEND.prefill(calls.prefill(lens))
        for batch in (2, 3, 5, 17):
            BACKEND.decode(calls.decode(batch))
            BACKEND.verify(calls.verify(batch, replay=True))
            BACKEND.verify(calls.verify(batch, replay=True, most=4))
            for rows in (8, 12):
                BACKEND.verify(calls.verify(batch, replay=True, most=4, rows=rows))
        BACKEND.conv(calls.conv([17, 64, 5]))
    assert {id(kernel) for kernel in kernels} == warm


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_whole_rows_are_copied_where_strides_allow(gate: str) -> None:
    """On compute capability 9.0; 16 programs of the preparation share a multiprocessor."""
    wide = calls.prefill([40], gate=gate)
    apart = torch.zeros(40, 16, 136, dtype=torch.bfloat16)[..., :128]
    with compiling("sm_90") as kernels:
        BACKEND.prefill(wide)
        BACKEND.prefill(replace(wide, tokens=replace(wide.tokens, k=apart)))
    copied, loaded = [kernel for kernel in kernels if kernel.metadata.name == "prepare_kernel"]
    assert "cp.async" in copied.asm["ptx"]
    assert "cp.async" not in loaded.asm["ptx"]
    assert 16 * (copied.metadata.shared + 1024) <= 228 << 10


@pytest.mark.parametrize("options", [{}, {"gate": "log_decay"}, {"value_heads": 32, "value_dim": 256}], ids=str)
def test_decode_of_bfloat16_states(options: dict[str, Any]) -> None:
    """In Gluon on compute capability 9.0, where copies take 16 bytes at a time; 16 programs a multiprocessor."""
    wide = calls.decode(2, torch.bfloat16, **options)
    apart = torch.zeros(2, 16, 136, dtype=torch.bfloat16)[..., :128]
    with compiling("sm_90") as kernels:
        BACKEND.decode(calls.decode(2, **options))
        BACKEND.decode(wide)
        BACKEND.decode(replace(wide, tokens=replace(wide.tokens, k=apart)))
    copied = [kernel for kernel in kernels if "cp.async" in kernel.asm["ptx"]]
    assert copied == kernels[1:2]
    assert 16 * (copied[0].metadata.shared + 1024) <= 228 << 10


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_what_is_replayed_in_gluon(state_dtype: torch.dtype) -> None:
    """On compute capability 9.0, states with their values first, where copies take 16 bytes at a time."""
    wide = calls.verify(2, True, 4, 8, state_dtype)
    apart = torch.zeros(wide.pool.shape[0], wide.pool[0].numel() + 8, dtype=state_dtype)[:, 8:]
    with compiling("sm_90") as kernels:
        BACKEND.verify(wide)
        BACKEND.verify(replace(wide, state_v_first=False))
        BACKEND.verify(replace(wide, pool=apart.unflatten(1, wide.pool.shape[1:])))
        BACKEND.verify(calls.verify(2, True, 4, 40, state_dtype))
    kernel, *others = kernels
    assert kernel.metadata.name == "replay_kernel"
    assert "replay_kernel" not in [other.metadata.name for other in others]


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("most", "rows", "programs"), [(2, 8, 3), (4, 8, 3), (8, 16, 4), (4, 12, 3), (8, None, 2), (8, 24, 3), (2, 32, 3)]
)
def test_replay_in_gluon(most: int, rows: int | None, programs: int, state_dtype: torch.dtype, gate: str) -> None:
    """So many programs share a multiprocessor (with bfloat16 states and up to 16 records four); the registers that they
    leave to each other hold everything in the serving layer's forms, and else all but two numbers or four: a few in
    memory cost a twentieth of the time. Accesses are as wide, copies waited for and replaced as the kernel means it."""
    with compiling("sm_90") as kernels:
        BACKEND.verify(calls.verify(2, True, most, rows, state_dtype, gate=gate))
    kernel = kernels[0]
    programs = 4 if state_dtype == torch.bfloat16 and (rows or most) <= 16 else programs
    assert programs * (kernel.metadata.shared + 1024) <= 228 << 10
    assert programs * 128 * kernel.metadata.maxnreg <= 64 << 10
    assert stack_bytes(kernel) <= (0 if (most, rows) in ((2, 8), (4, 8), (8, 16)) else 16)
    ptx = kernel.asm["ptx"]
    assert "st.global.v2" not in ptx
    copies = [m.start() for m in re.finditer("cp.async.commit_group", ptx)]
    waits = [(m.start(), int(m[1])) for m in re.finditer(r"cp\.async\.wait_group\s+(\d+)", ptx)]
    assert len(waits) == len(copies) == (4 if state_dtype == torch.float32 else 2)
    for n, (at, pending) in enumerate(waits):
        asked = sum(copy < at for copy in copies)
        assert asked - pending == n + 1  # that copy and those before it are there
    late = ptx[waits[0][0] :]
    for copy in re.finditer("cp.async.cg", late):  # a place is filled again behind a barrier that follows its reads
        before = late[: copy.start()]
        assert before.rindex("bar.sync") > before.rindex("ld.shared.v4")


@pytest.mark.parametrize("name", TARGETS)
def test_a_step_waits_for_the_kernel_before_it(name: str) -> None:
    """Where it may start before that has ended: from compute capability 9.0 on. What it reads before only hints at what
    to prefetch, and must not stay in the first cache."""
    overlapping = name.startswith("sm_") and int(name[3:]) >= 90
    with compiling(name) as kernels:
        BACKEND.decode(calls.decode(2))
        BACKEND.decode(calls.decode(2, torch.bfloat16))
        BACKEND.verify(calls.verify(2, replay=False))
        if name == "sm_90":
            BACKEND.verify(calls.verify(2, replay=True))
    for kernel in kernels:
        assert getattr(kernel.metadata, "launch_pdl", False) == overlapping
        if overlapping:
            before, after = kernel.asm["ptx"].split("griddepcontrol.wait", 1)
            assert "ld.global" not in before.replace("ld.global.cg", "")
            assert "ld.global" in after
            assert "st.global" not in before
            assert ("ld.global" in before) == ("prefetch" in before) == (kernel.metadata.name == "replay_kernel")


def test_launches_a_call() -> None:
    """At most three, five where sequences are cut."""
    with compiling("sm_90") as kernels:
        BACKEND.prefill(calls.prefill([40, 20]))
        assert [kernel.metadata.name for kernel in kernels] == ["tiles_kernel", "prepare_kernel", "scan_kernel"]
        kernels.clear()
        with mock.patch.object(plan, "shares", return_value=5):
            BACKEND.prefill(calls.prefill([40, 20]))
        assert len(kernels) == 3
        kernels.clear()
        with mock.patch.object(plan, "cut", return_value=CUT):
            BACKEND.prefill(calls.prefill([40, 20]))
        assert len(kernels) == 5


def test_launcher_tells_apart_what_triton_specialises_on() -> None:
    """A launcher must not reuse a kernel that was compiled for other strides, dtypes, alignment or constants."""
    seen: list[tuple[object, ...]] = []

    class Compiled:
        function = packed_metadata = None
        metadata = mock.Mock()  # of another vendor's device: launched by Triton

        def run(self, *args: object) -> None:
            seen.append(("reused",))

    class Kernel:
        def __getitem__(self, grid: object) -> object:
            def compile_and_launch(*args: object, **options: object) -> Compiled:
                seen.append(("compiled",))
                return Compiled()

            return compile_and_launch

    launcher = launch.Launcher(Kernel())
    x = torch.zeros(64)

    def key(data: torch.Tensor = x, strides: tuple[int, ...] = (16,), constants: tuple[int, ...] = (1,)) -> object:
        before = len(launcher.compiled)
        bound = launcher.bind(torch.device("cuda", 0), (1, 1, 1), (), strides, constants, num_warps=1)
        with (
            mock.patch.object(torch._C, "_cuda_getDevice", return_value=0, create=True),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
        ):
            bound((data,), ())
            bound((data,), ())  # the second time without a look at anything but addresses
        return len(launcher.compiled) - before

    assert key() == 1
    assert key() == 0
    assert key(torch.ones(64)) == 0
    assert key(x[1:]) == 1  # not aligned to 16 bytes
    assert key(x.to(torch.bfloat16)) == 1
    assert key(strides=(8,)) == 1
    assert key(constants=(2,)) == 1
    assert seen.count(("compiled",)) == 5
    assert seen.count(("reused",)) == 9


def test_bound_launch_looks_at_alignment_every_time() -> None:
    """The one thing that differs between calls of a kind and decides the kernel."""
    compiled: list[tuple[object, ...]] = []

    class Kernel:
        def __getitem__(self, grid: object) -> object:
            def compile_and_launch(*args: object, **options: object) -> object:
                compiled.append(args)
                return mock.Mock()

            return compile_and_launch

    bound = launch.Launcher(Kernel()).bind(torch.device("cuda", 0), (1, 1, 1), (), (1,), (), num_warps=1)
    x = torch.zeros(64)
    with (
        mock.patch.object(torch._C, "_cuda_getDevice", return_value=0, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
    ):
        wanted = [bound((x[start:], None), (x[1:],)) for start in (0, 1, 4, 2, 0)]
        assert wanted == [True, True, False, False, False]
        assert not bound((x, None), (), compile_only=True)
    assert len(compiled) == 2


def test_parameters_are_packed_as_the_kernels_read_them() -> None:
    """Number and sizes of what `launch.Compiled` packs, against the entry points of the machine code."""
    packed = []
    first = launch.Launch._first

    def recorded(
        self: launch.Launch,
        data: tuple[torch.Tensor | None, ...],
        tables: tuple[torch.Tensor | None, ...],
        *options: Any,
    ) -> bool:
        result = first(self, data, tables, *options)
        absent = [x is None for x in (*data, *tables)]
        known = launch.Compiled(kernels[-1], absent, len(self._rest))
        assert known.direct
        packed.append((kernels[-1], known.place(self._grid, self._rest)))
        return result

    with compiling("sm_90") as kernels, mock.patch.object(launch.Launch, "_first", recorded):
        launch_everything()
        BACKEND.prefill(calls.prefill([40], dtype=torch.float32, gate="bounded"))
    assert {kernel.metadata.name for kernel, _ in packed} == GLUON_KERNELS
    for kernel, placed in packed:
        entry = kernel.asm["ptx"].split(".entry")[1].split(")")[0]
        sizes = [{"u64": 8, "u32": 4, "f32": 4}[kind] for kind in re.findall(r"\.param \.(\w+) ", entry)]
        addresses, values = sizes[: placed.addresses], sizes[placed.addresses :]
        assert addresses == [8] * placed.addresses
        assert len(placed.values) == 8 * len(values)
        for offset, size in zip(range(0, len(placed.values), 8), values):
            assert placed.values[offset + size : offset + 8] == bytes(8 - size)


def test_what_triton_alone_can_launch_is_left_to_it() -> None:
    with compiling("gfx942") as kernels:
        BACKEND.norm(calls.norm(5))
    types = list(kernels[0].src.signature.values())
    assert not launch.Compiled(kernels[0], [False] * 4, len(types) - 4).direct


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_a_decode_program_asks_for_everything_before_its_branch(gate: str) -> None:
    """What is loaded behind the branch waits for another round trip to the memory."""
    with compiling("sm_90") as kernels:
        BACKEND.decode(calls.decode(64, gate=gate))
    lines = kernels[-1].asm["ptx"].splitlines()
    branch = next(n for n, line in enumerate(lines) if re.search(r"@%p\d+\s+bra", line))
    loads = [n for n, line in enumerate(lines) if "ld.global" in line]
    assert len(loads) > 10
    assert max(loads) < branch
