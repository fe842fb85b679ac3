"""A stand-in for vLLM on the import path: the names and signatures of a supported version, small enough to run here."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rapidkda.integrations.vllm import plugin, post_import
from rapidkda.integrations.vllm.contract import Text
from rapidkda.integrations.vllm.seams import SEAMS, Seam

STANDINS = Path(__file__).parent / "standins"
FOLDERS = {"0.25.1": "v0_25", "0.33.0": "v0_33"}


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
    monkeypatch.setattr(plugin, "_taken", set())
    forget_vllm()

    def enter(version: str, claimed: str | None = None) -> Path:
        root = tmp_path / "standin"
        shutil.copytree(STANDINS / "common", root)
        shutil.copytree(STANDINS / FOLDERS[version], root, dirs_exist_ok=True)
        package = root / "vllm" / "__init__.py"
        package.write_text(package.read_text().replace('"0"', repr(claimed or version)))
        monkeypatch.syspath_prepend(str(root))
        return root

    yield enter
    post_import.forget()
    forget_vllm()
