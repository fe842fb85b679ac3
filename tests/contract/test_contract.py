"""Every check on every backend that can run on this machine.

pytest tests/contract --backend torch     one backend
TRITON_INTERPRET=1 pytest tests/contract --backend triton     its kernels on a CPU, in reduced sizes
"""

from __future__ import annotations

import pytest

from rapidkda.errors import BackendUnavailable

from . import (  # noqa: F401  importing a module registers its checks
    causality,
    checkpoints,
    convolution,
    decode,
    deferred,
    gated_norm,
    gradients,
    graphs,
    layer,
    layout,
    long,
    numerics,
    offsets,
    repeats,
    slots,
    strides,
    tables,
    tails,
    verify,
    workspace,
)
from .cases import CASES
from .target import NotHere, Target


def test_case(backend: Target, name: str) -> None:
    if backend.interpreted and CASES[name].slow_when_interpreted:
        pytest.skip("too many tokens for an interpreted kernel")
    try:
        CASES[name].run(backend)
    except NotHere as reason:
        pytest.skip(str(reason))
    except BackendUnavailable as error:
        if backend.name == "torch":
            raise  # the portable backend serves everything
        pytest.skip(str(error))
