"""Runs interpreted.py in a process of its own: the interpreter must be chosen before the kernels are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the package triton", minversion="3.6")

HERE = Path(__file__).parent


def test_kernels_are_right_under_the_interpreter() -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    environment.pop("PYTEST_ADDOPTS", None)
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "interpreted.py")]
    result = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
