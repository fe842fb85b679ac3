"""A small random model, built once."""

from __future__ import annotations

from typing import Any

import pytest

from rapidkda.testing.models import build_glm5_next

pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def small() -> Any:
    """Two experts of which every token takes both: no routing that rounding could tip."""
    return build_glm5_next(0, hidden_size=32, head_dim=16, experts=2)
