"""The backend under test."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from rapidkda import dispatch

from .cases import CASES, every_value
from .target import Target, find


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case on every backend; a backend that cannot run here is one skipped test with its reasons, and one that is
    interpreted runs fewer combinations of parameters."""
    if "backend" not in metafunc.fixturenames:
        return
    names = metafunc.config.getoption("--backend") or list(dispatch.REGISTRY)
    if "name" not in metafunc.fixturenames:
        metafunc.parametrize("backend", names, indirect=True)
        return
    pairs = [(name, case) for name in names for case in _cases(find(name))]
    metafunc.parametrize(("backend", "name"), pairs, indirect=["backend"], ids=["-".join(pair) for pair in pairs])


def _cases(found: Target | list[str]) -> Iterable[str]:
    if not isinstance(found, Target):
        return ["-"]
    return every_value() if found.interpreted else CASES


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Target:
    found = find(request.param)
    if isinstance(found, Target):
        return found
    pytest.skip(f"{request.param} cannot run here: {'; '.join(found)}")
