"""What the assembler made of the kernels: the main loops of all roles spill nothing."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cuda.core")

from rapidkda.backends.cuda import compiler
from rapidkda.backends.cuda.compiler import KernelSource
from rapidkda.backends.cuda.host import steps
from rapidkda.backends.cuda.host.prefill import kernels

SPILLS = re.compile(r"\b(LDL|STL)\b")


def cuobjdump() -> str | None:
    """The disassembler on the path, or the one in triton's package."""
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        carried = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        if carried.exists():
            return str(carried)
    return shutil.which("cuobjdump")


def disassemble(kernel: KernelSource, folder: Path) -> list[tuple[int, str]]:
    """(address, instruction) of a kernel."""
    tool = cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump: install triton or the CUDA toolkit")
    path = folder / "kernel.cubin"
    path.write_bytes(compiler.compiled(kernel))
    text = subprocess.run([tool, "-sass", str(path)], capture_output=True, text=True, check=True).stdout
    return [(int(a, 16), code) for a, code in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?) ;", text)]


def innermost_loops(code: list[tuple[int, str]], holding: str) -> list[list[str]]:
    """Bodies of backward branches that hold an instruction, the shortest of those that overlap: a wait's retry lies out
    of line and jumps back too."""
    loops: list[tuple[int, int]] = []
    for address, instruction in code:
        branch = re.search(r"\bBRA\S* .*?0x([0-9a-f]+)", instruction)
        if branch and int(branch[1], 16) < address:
            loops.append((int(branch[1], 16), address))
    kept: list[tuple[int, int]] = []
    for first, last in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        apart = all(last < begin or end < first for begin, end in kept)
        if apart and any(first <= at <= last and holding in text for at, text in code):
            kept.append((first, last))
    return [[text for at, text in code if first <= at <= last] for first, last in kept]


@pytest.mark.parametrize("kernel", [k for k in kernels() if k.entry == "prefill"], ids=str)
def test_the_main_loops_spill_nothing(kernel: KernelSource, tmp_path: Path) -> None:
    code = disassemble(kernel, tmp_path)
    loops = innermost_loops(code, "HGMMA.64x128x16")
    # The device chooses: a share, a pair, B, M; and their producers and the walk.
    bodies = 4 if ("KDA_FORM", "kTransition") in kernel.macros else 1
    assert len(loops) == bodies
    for consumers in loops:
        assert len(consumers) < 330  # what chunks rarely need lies outside: a jump over it costs 20 cycles
        assert [text for text in consumers if SPILLS.search(text)] == []
        # Two waits for W, one for the update; wgmma that are serialised have one each.
        assert len([text for text in consumers if "WARPGROUP.DEPBAR" in text]) <= 3
        # Addresses of tiles stay in uniform registers; moving them there for each chunk costs the pair a tenth.
        assert len([text for text in consumers if "R2UR" in text]) <= 4
    makers = innermost_loops(code, "HMMA.1688.F32.BF16")  # norms of queries; the walk has none
    assert len(makers) == max(bodies - 1, 1)
    for producers in makers + innermost_loops(code, "MUFU.EX2"):
        assert [text for text in producers if SPILLS.search(text)] == []


def straight_runs(code: list[str]) -> list[list[str]]:
    """What lies between branches, from the first product to the last."""
    runs: list[list[str]] = [[]]
    for text in code:
        if re.search(r"\bBRA\b", text):
            runs.append([])
        else:
            runs[-1].append(text)
    products = [[n for n, text in enumerate(run) if "HMMA" in text] for run in runs]
    return [run[at[0] : at[-1] + 1] for run, at in zip(runs, products, strict=True) if at]


@pytest.mark.parametrize("kernel", steps.kernels(), ids=str)
def test_the_usual_turns_of_a_replay_are_straight(kernel: KernelSource, tmp_path: Path) -> None:
    """The products of either part in one run of instructions: no branch, fewer moves than products, no spills."""
    runs = straight_runs([text for _, text in disassemble(kernel, tmp_path)])
    macros = dict(kernel.macros)
    tiles, groups = (2 if macros["KDA_TOKENS"] == "8" else 1), (int(macros["KDA_FOLDS"]) + 7) // 8
    stored = 4 * (6 * groups + 3 * tiles)  # of half of the channels, 16 at a time
    expected = {stored: 2}
    if macros["KDA_DEFERRED"] == "true" and macros["KDA_MANY_TURNS"] == "false":
        for part in (2 * 3 * tiles, 6 * 3 * tiles):  # of the state as it is, before and after the look ahead
            expected[part] = expected.get(part, 0) + 1
    for products, count in expected.items():
        found = [run for run in runs if len([text for text in run if "HMMA" in text]) == products]
        assert len(found) >= count
        for run in found:
            assert len(run) < 64 + 8 * products
            assert len([text for text in run if text.startswith("MOV")]) < products // 2
            assert [text for text in run if SPILLS.search(text)] == []
