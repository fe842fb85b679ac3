"""A small random model, built once, and the trained one that ships."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rapidkda.engine.loading import SHIPPED, load_model
from rapidkda.testing.models import build_glm5_next

pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def small() -> Any:
    """Two experts of which every token takes both: no routing that rounding could tip."""
    return build_glm5_next(0, hidden_size=32, head_dim=16, experts=2)


@pytest.fixture(scope="session")
def trained() -> Callable[[torch.dtype], Any]:
    """The model that ships, in a dtype."""
    return lambda dtype: load_model(SHIPPED, dtype=dtype)
