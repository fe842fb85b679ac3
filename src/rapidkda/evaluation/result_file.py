"""The battery's result as a JSON file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..serving.weights import Source
from .battery import Report
from .logprobs import EDGES


def as_json(report: Report, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values: `meta`, then the report, with the verdict of each candidate; what is not finite becomes null."""
    content = dataclasses.asdict(report)
    for one, judged in zip(content["judged"], report.judged):
        one["within"] = judged.within
        for verdict, found in zip(one["verdicts"], judged.verdicts):
            verdict["within"] = found.within
    plain: dict[str, Any] = _finite({"meta": dict(meta), "histogram_edges": list(EDGES), **content})
    return plain


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all."""
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_text(json.dumps(content, separators=(",", ":")).replace('},{"', '},\n{"') + "\n")
    temporary.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load(path: Path) -> dict[str, Any]:
    """Read a file that `save` wrote. Raises ValueError that says what is wrong with it."""
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be a JSON file: {error}") from None
    if not isinstance(content, dict) or not {"meta", "judged", "questions", "half_lives"} <= content.keys():
        raise ValueError(f"{path} must be a result file of rapidkda eval")
    return content


def weights_digest(folder: Path) -> str:
    """SHA-256 of names and values of all tensors in a folder: the same weights, however they are stored."""
    digest = hashlib.sha256()
    with Source(folder) as tensors:
        for name in sorted(tensors.names("")):
            digest.update(name.encode())
            digest.update(tensors.read(name).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
