"""The backend under test."""

from __future__ import annotations

import pytest

from rapidkda import dispatch

from .cases import CASES
from .target import Target, find


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case on every backend; a backend that cannot run here is one skipped test with its reasons."""
    if "backend" not in metafunc.fixturenames:
        return
    names = metafunc.config.getoption("--backend") or list(dispatch.REGISTRY)
    if "name" not in metafunc.fixturenames:
        metafunc.parametrize("backend", names, indirect=True)
        return
    pairs = [(name, case) for name in names for case in (CASES if isinstance(find(name), Target) else ["-"])]
    metafunc.parametrize(("backend", "name"), pairs, indirect=["backend"], ids=["-".join(pair) for pair in pairs])


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Target:
    found = find(request.param)
    if isinstance(found, Target):
        return found
    pytest.skip(f"{request.param} cannot run here: {'; '.join(found)}")
