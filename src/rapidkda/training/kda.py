"""Where training takes Kimi Delta Attention with gradients from."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from .forward import Kda

SOURCES = ("fla", "transformers")


def kda_from(source: str) -> Kda:
    """`fla`: flash-linear-attention's Triton kernels, on a GPU. `transformers`: the slow formula of the model itself.

    Raises ValueError for another name, ImportError when the package is missing.
    """
    if source == "fla":
        return _fla()
    if source == "transformers":
        return _transformers()
    raise ValueError(f"kda must be one of {', '.join(SOURCES)}, got {source!r}")


def working_kda(device: torch.device, head_dim: int) -> tuple[str, Kda]:
    """The first source that runs forward and backward on the device, and its name."""
    reasons = []
    for source in SOURCES if device.type == "cuda" else SOURCES[1:]:
        try:
            kda = kda_from(source)
            shape = (1, 64, 1, head_dim)
            inputs = [torch.full(shape, 0.1, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)]
            g = torch.full(shape, -0.1, device=device, requires_grad=True)
            beta = torch.full(shape[:3], 0.5, dtype=torch.bfloat16, device=device, requires_grad=True)
            q, k, v = inputs
            kda(q, k, v, g, beta).float().sum().backward()
        except Exception as error:  # whatever a package of another project raises, the next source is tried
            reasons.append(f"{source}: {error!r}")
            continue
        return source, kda
    raise RuntimeError(f"no source of gradients works on {device}: {'; '.join(reasons)}")


def _fla() -> Kda:
    chunk_kda: Any = importlib.import_module("fla.ops.kda").chunk_kda

    def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        out: Tensor = chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, safe_gate=True, disable_recompute=True)[
            0
        ]
        return out

    return kda


def _transformers() -> Kda:
    family: Any = importlib.import_module("transformers.models.glm5_next.modeling_glm5_next")
    formula = inspect.unwrap(family.chunk_kimi_delta_attention)  # what wraps it calls another package where it can

    def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        out: Tensor = formula(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        return out

    return kda
