"""Small models, built once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rapidkda import env
from rapidkda.testing.models import build_glm5_next, build_kimi_linear

pytest.importorskip("transformers")

# Two experts of which every token takes both: no routing that rounding could tip.
SIZES: dict[str, int] = {"hidden_size": 32, "head_dim": 16, "experts": 2}
BUILDERS: dict[str, Callable[..., Any]] = {"glm5_next": build_glm5_next, "kimi_linear": build_kimi_linear}


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (env.PREFILL_BACKEND, env.DECODE_BACKEND):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="session")
def models() -> dict[str, Any]:
    return {name: build(0, **SIZES) for name, build in BUILDERS.items()}


@pytest.fixture(params=sorted(BUILDERS))
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    """Each family in turn."""
    return models[request.param]


@pytest.fixture
def kimi(models: dict[str, Any]) -> Any:
    return models["kimi_linear"]
