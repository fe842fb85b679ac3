"""The code that docs/serving.md shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, torch.Tensor] = {}
    exec(code, names)
    assert names["out"].shape == (11, 64)
