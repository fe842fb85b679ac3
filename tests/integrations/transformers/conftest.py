"""Small models of both families on the torch backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rapidkda.integrations.transformers import restore

from .support import BUILDERS, FAMILIES


@pytest.fixture(autouse=True)
def torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are on the CPU, where torch is what `auto` takes; naming it keeps other backends' state out."""
    monkeypatch.setenv("RAPIDKDA_PREFILL_BACKEND", "torch")
    monkeypatch.setenv("RAPIDKDA_DECODE_BACKEND", "torch")


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    return {family: build() for family, build in BUILDERS.items()}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, built: dict[str, Any]) -> Iterator[Any]:
    yield built[request.param]
    restore(built[request.param])


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)
