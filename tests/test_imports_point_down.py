"""The architecture as a test: imports point down, importing rapidkda loads no backend, the reference stands alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rapidkda

ROOT = Path(rapidkda.__file__).parent

# Lowest first. A part may import itself and what is lower; parts of one row may not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "env", "checks", "reference", "device"),
    ("segments",),
    ("problem",),
    ("backends",),
    ("dispatch",),
    ("ops",),
    ("__init__",),  # the public names
    ("testing",),
    ("serving", "training"),
    ("engine",),
    ("evaluation",),
    ("integrations",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
RANK = {part: rank for rank, row in enumerate(LAYERS) for part in row}
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """Dotted name below rapidkda, e.g. backends.torch.chunk; "__init__" for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names below rapidkda that a file imports, anywhere in it, with their lines."""
    package = ["rapidkda", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{source}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "rapidkda":
                yield below_root(target), node.lineno


def below_root(target: str) -> str:
    """rapidkda.ops.prefill -> ops.prefill; a public name of the package itself, like rapidkda.Segments -> __init__."""
    parts = target.split(".")[1:]
    known = bool(parts) and ((ROOT / parts[0]).is_dir() or (ROOT / f"{parts[0]}.py").is_file())
    return ".".join(parts) if known else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    part = name_of(path).split(".")[0]
    assert part in RANK, f"give {part} its place in LAYERS"
    for target, line in imports(path):
        other = target.split(".")[0]
        assert other in RANK, f"give {other} its place in LAYERS"
        down = RANK[other] < RANK[part]
        assert down or other == part, f"{path.relative_to(ROOT)}:{line} imports {target}, which is not below {part}"


def test_the_check_sees_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, absolute and late imports are all seen."""
    (tmp_path / "ops").mkdir()
    (tmp_path / "problem.py").write_text("def late():\n    from .ops import prefill\n\n    import rapidkda.ops.bind\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert [target for target, _ in imports(tmp_path / "problem.py")] == ["ops.prefill", "ops.bind"]


def test_backends_do_not_know_each_other_but_for_shared_rows() -> None:
    """One backend may not call another; the adapter shares the torch backend's reading and writing of pool rows."""
    allowed = {("flashkda", "backends.torch.pools")}
    shared = ("base", "driver")
    for path in (ROOT / "backends").rglob("*.py"):
        parts = name_of(path).split(".")
        if len(parts) < 2 or parts[1] in shared:
            continue
        for target, line in imports(path):
            pieces = target.split(".")
            if pieces[0] == "backends" and len(pieces) > 1 and pieces[1] not in (parts[1], *shared):
                assert (parts[1], target) in allowed, f"{path.relative_to(ROOT)}:{line} imports {target}"


def test_importing_the_package_loads_no_backend() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import rapidkda\n"
        "heavy = 'triton', 'transformers', 'vllm', 'typer', 'cuda', 'matplotlib'\n"
        "print([m for m in set(sys.modules) - before if m.split('.')[0] in heavy\n"
        "       or m.startswith('rapidkda.backends.') and m != 'rapidkda.backends.base'])"
    )
    where = {"PYTHONPATH": str(ROOT.parent), "PATH": ""}
    found = subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_reference_imports_nothing_of_ours() -> None:
    assert list(imports(ROOT / "reference.py")) == []


def test_kernel_sources_know_nothing_of_torch() -> None:
    sources = [p for p in (ROOT / "backends").rglob("csrc/**/*") if p.suffix in (".cu", ".cuh", ".h", ".hpp")]
    guilty = [p.name for p in sources if "#include <torch" in p.read_text() or "#include <ATen" in p.read_text()]
    assert not guilty
