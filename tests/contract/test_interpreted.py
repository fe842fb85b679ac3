"""The contract suite on the Triton backend without a GPU: its kernels run under Triton's interpreter, in shards.

The interpreter must be chosen before the kernels are loaded, so every shard is a process of its own; as tests they are
spread over pytest's workers. Cases of many tokens are left out, others are cut short (`Target.tokens`), and not every
combination of parameters runs (`cases.every_value`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs the package triton", minversion="3.6")

SHARDS = 16
HERE = Path(__file__).parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="the suite runs on the compiled kernels here")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_triton_kernels_keep_the_contract(shard: int) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--backend", "triton", "--shard", f"{shard}/{SHARDS}"]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "test_contract.py")]
    result = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
