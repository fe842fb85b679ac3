"""The backend under test."""

from __future__ import annotations

import pytest

from rapidkda import dispatch

from .target import Target, find


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        names = metafunc.config.getoption("--backend") or list(dispatch.REGISTRY)
        metafunc.parametrize("backend", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Target:
    found = find(request.param)
    if isinstance(found, Target):
        return found
    pytest.skip(f"{request.param} cannot run here: {'; '.join(found)}")
