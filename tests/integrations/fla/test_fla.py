"""Every supported flash-linear-attention, from its wheels, each in a process of its own; see checks.py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .. import wheels

SOURCES = "RAPIDKDA_FLA_SOURCES"  # keep unpacked sources here between runs
VERSIONS = ("0.5.0", "0.5.2", "0.6.0")
CHECKS = Path(__file__).parent / "checks.py"


def run_checks(import_path: list[Path]) -> None:
    path = os.pathsep.join([*map(str, import_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", str(CHECKS)]
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("PYTEST_XDIST_WORKER", None)
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="fla needs triton to be imported")
@pytest.mark.parametrize("version", VERSIONS)
def test_published_version(version: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("transformers")
    cache = wheels.cache_root(SOURCES, request.config)
    merged = tmp_path / "fla"  # fla's operators and its layers come in two wheels of one package
    try:
        for package in ("fla-core", "flash-linear-attention"):
            unpacked = wheels.members(f"{package}=={version}", ["fla/"], cache / f"{package}-{version}")
            shutil.copytree(unpacked, merged, dirs_exist_ok=True)
        if importlib.util.find_spec("einops") is None:
            shutil.copytree(wheels.members("einops", ["einops/"], cache / "einops"), merged, dirs_exist_ok=True)
    except wheels.Unavailable as reason:
        pytest.skip(f"no sources of flash-linear-attention {version}: {reason}")
    run_checks([merged])


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_installed_version() -> None:
    run_checks([])
