"""The backend under test."""

from __future__ import annotations

import pytest

from .target import Target, find


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Target:
    found = find(request.param)
    if isinstance(found, Target):
        return found
    pytest.skip(f"{request.param} cannot run here: {'; '.join(found)}")
