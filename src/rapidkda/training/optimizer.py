"""Muon for the matrices of hidden layers and AdamW for everything else, behind one learning-rate factor.

Muon's step is the orthogonal matrix nearest to the gradient's moving average, by five Newton-Schulz iterations (Jordan
et al., 2024). Matrices of one shape go through them together, as one batch, which torch's own Muon does not do: a small
model has a hundred small matrices, and their launches would take longer than the step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MUON_RATE = 0.02
ADAM_RATE = 3e-3
MOMENTUM = 0.95
DECAY = 0.02  # weight decay of the matrices, times the learning rate
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
NO_MUON = (".embed_tokens.", ".lm_head.", "_hc.", ".b_proj.")  # tables, and rows that are outputs of their own


class Optimizer:
    """Moves named parameters: those that `takes_muon` says by Muon, the others by AdamW."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        matrices: dict[torch.Size, list[Tensor]] = {}
        others: list[nn.Parameter] = []
        for name, parameter in named:
            if takes_muon(name, parameter):
                matrices.setdefault(parameter.shape, []).append(parameter)
            else:
                others.append(parameter)
        self._groups = [(group, torch.zeros(len(group), *group[0].shape).to(group[0])) for group in matrices.values()]
        self._adam = torch.optim.AdamW(
            others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda or None
        )

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Move by the gradients, at `factor` times the full learning rates, and drop them."""
        for group, average in self._groups:
            gradients = torch.stack([_gradient(parameter) for parameter in group])
            average.lerp_(gradients, 1 - MOMENTUM)
            update = orthogonal(gradients.lerp(average, MOMENTUM))
            rows, columns = update.shape[-2:]
            rate = factor * MUON_RATE
            torch._foreach_mul_(group, 1 - rate * DECAY)
            scale = rate * max(1, rows / columns) ** 0.5
            torch._foreach_add_(group, list(update.to(average.dtype).unbind()), alpha=-scale)
            for parameter in group:
                parameter.grad = None
        for settings in self._adam.param_groups:
            settings["lr"] = factor * ADAM_RATE
        self._adam.step()
        self._adam.zero_grad()


def takes_muon(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix of a hidden layer."""
    return parameter.dim() == 2 and not any(part in f".{name}" for part in NO_MUON)


def orthogonal(matrices: Tensor) -> Tensor:
    """Roughly the nearest orthogonal matrices of [N, A, B]: singular values go to between 0.7 and 1.2. In bfloat16."""
    x = matrices.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = x if wide else x.mT
    return out


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
