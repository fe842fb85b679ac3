"""vLLM without vLLM: real sources of the supported versions to read, and stand-ins that can be imported and run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rapidkda.integrations import post_import
from rapidkda.integrations.contract import Members, Text
from rapidkda.integrations.vllm import plugin, wrap
from rapidkda.integrations.vllm.seams import SEAMS, Seam

from .. import wheels

SOURCES = "RAPIDKDA_VLLM_SOURCES"  # keep unpacked sources here between runs: <folder>/<version>/vllm/...
STANDINS = Path(__file__).parent / "standins"
FOLDERS = {  # later folders lie over earlier ones
    "0.25.1": ("v0_25",),
    "0.26.0": ("v0_25",),
    "0.29.0": ("v0_33",),
    "0.30.0": ("v0_33", "v0_30"),
    "0.32.0": ("v0_33",),
    "0.33.0": ("v0_33",),
}


def without_texts(seam: Seam) -> Seam:
    """The seam's names and signatures; stand-ins share those, not vLLM's code."""
    return replace(seam, facts=tuple(fact for fact in seam.facts if not isinstance(fact, Text)))


def forget_vllm() -> None:
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Call with a version: vLLM of that version can be imported until the test ends. Returns its root."""
    monkeypatch.delenv("RAPIDKDA_VLLM", raising=False)
    monkeypatch.setattr(plugin, "SEAMS", {version: without_texts(seam) for version, seam in SEAMS.items()})
    monkeypatch.setattr(wrap, "_taken", set())
    forget_vllm()

    def enter(version: str, claimed: str | None = None) -> Path:
        root = tmp_path / "standin"
        for folder in ("common", *FOLDERS[version]):
            shutil.copytree(STANDINS / folder, root, dirs_exist_ok=True)
        package = root / "vllm" / "__init__.py"
        package.write_text(package.read_text().replace('"0"', repr(claimed or version)))
        monkeypatch.syspath_prepend(str(root))
        return root

    yield enter
    post_import.forget()
    forget_vllm()


def modules(seam: Seam) -> set[str]:
    """Every module that a seam names."""
    named = {fact.module for fact in seam.facts}
    named |= {module for fact in seam.facts if isinstance(fact, Members) for module, _ in fact.bases}
    return named | {part.module for part in (*seam.layers, *seam.builders, *seam.refused)}


@pytest.fixture(scope="module", params=sorted(SEAMS))
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seam(version: str) -> Seam:
    return SEAMS[version]


@pytest.fixture(scope="module")
def root(version: str, seam: Seam, request: pytest.FixtureRequest) -> Path:
    """Unpacked sources of the version, or a skip that says why there are none."""
    folder = wheels.cache_root(SOURCES, request.config) / version
    names = [module.replace(".", "/") + suffix for module in modules(seam) for suffix in (".py", "/__init__.py")]
    try:
        return wheels.members(f"vllm=={version}", names, folder)
    except wheels.Unavailable as reason:
        pytest.skip(f"no sources of vLLM {version}: {reason}")
