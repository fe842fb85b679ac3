"""A tiny model of the shipped model's shape, and a stretch of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers")

TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "linear_num_heads": 2,
    "linear_head_dim": 32,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Five thousand short sentences."""
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"The number after {i} is {i + 1}.\0" for i in range(5000)))
    return path
