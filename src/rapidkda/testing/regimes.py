"""Gate regimes: how fast memory decays and how the keys correlate. They decide what an input can show.

Fast random gates forget within a few tokens and hide most faults, so every regime is run. Each returns raw inputs
(gate logits, beta logits, unnormalised q and k), as a model's projections would produce them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes import Shape

BLOCK = 16  # tokens; the staggered regime closes each half of the channels for half a block


@dataclass(slots=True, eq=False)
class Raw:
    """Raw inputs of a regime, float32: the KDA operands before any rounding, the gate's parameters and the states."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV, K] gate logits
    beta: Tensor  # [T, HV] logits
    A_log: Tensor  # [HV]
    dt_bias: Tensor  # [HV, K]
    states: Tensor | None = None  # [N, HV, V, K]; None: small random ones


@dataclass(frozen=True)
class Regime:
    """One regime. `lower_bound` None means the unbounded softplus gate."""

    name: str
    summary: str
    lower_bound: float | None
    adapt: Callable[[Raw, Shape, torch.Generator], None]
    timed: bool = True  # False: for accuracy only

    def generate(self, shape: Shape, generator: torch.Generator) -> Raw:
        """Draw the inputs of all tokens of `shape` on the generator's device."""
        device = generator.device

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        tokens, hv = shape.tokens, shape.hv
        raw = Raw(
            q=normal(tokens, shape.heads, shape.key_dim),
            k=normal(tokens, shape.heads, shape.key_dim),
            v=normal(tokens, hv, shape.value_dim),
            g=normal(tokens, hv, shape.key_dim),
            beta=normal(tokens, hv),
            A_log=torch.zeros(hv, device=device),
            dt_bias=torch.zeros(hv, shape.key_dim, device=device),
        )
        self.adapt(raw, shape, generator)
        return raw


def _uniform(like: Tensor, generator: torch.Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(like.shape, generator=generator, device=like.device)


def _fast(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
    raw.A_log = _uniform(raw.A_log, generator)
    raw.dt_bias = _uniform(raw.dt_bias, generator)


def _slow(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
    raw.dt_bias = _uniform(raw.dt_bias, generator) - 8.0


def _mixed(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
    raw.dt_bias = _uniform(raw.dt_bias, generator)
    raw.dt_bias[:, ::2] -= 8.0


def _collinear(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
    raw.k = raw.k[:1].expand_as(raw.k).clone()
    raw.g.fill_(-12.0)
    raw.beta.fill_(8.0)


def _unbounded(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
    raw.A_log = _uniform(raw.A_log, generator, 1.0, 16.0).log()
    step = _uniform(raw.dt_bias, generator, 1e-3, 1e-1)
    raw.dt_bias = step + torch.log(-torch.expm1(-step))  # inverse softplus


def _staggered(raw: Raw, shape: Shape, generator: torch.Generator) -> None:
    """Half of the channels closed for 8 tokens, then the other half; one key that spans both halves at every seam.

    Between the seams keys stay in the closed half, so what the open half holds survives, and at a seam the delta rule
    moves half of it into the half that opens next. No channel stays open, yet the state is not forgotten.
    """
    half = shape.key_dim // 2
    first = torch.arange(shape.key_dim, device=raw.k.device) < half
    position = torch.cat([torch.arange(n, device=raw.k.device) for n in shape.seq_lens])
    closes_first = position % BLOCK < BLOCK // 2  # [T]
    closed = torch.where(closes_first[:, None], first, ~first)  # [T, K]
    raw.g = torch.where(closed, 12.0, -12.0)[:, None, :].expand_as(raw.g).clone()
    seam = position % (BLOCK // 2) == BLOCK // 2 - 1
    raw.k = torch.where(closed[:, None, :], raw.k, torch.zeros_like(raw.k))
    raw.k[seam] = torch.randn(raw.k.shape[1:], generator=generator, device=raw.k.device)
    raw.beta.fill_(8.0)


REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        Regime("fast", "random gates, memory of a few tokens", -5.0, _fast),
        Regime("slow", "log decay about -2e-3: the heads that carry long memory", -5.0, _slow),
        Regime("mixed", "every second channel slow", -5.0, _mixed),
        Regime("collinear", "one key repeated, write strength near 1, hardly any decay", -5.0, _collinear),
        Regime("unbounded", "softplus gate without a floor, as Kimi-Linear trains it", None, _unbounded),
        Regime("staggered", "channel halves closed in turn, keys that carry mass across", -5.0, _staggered, False),
    )
}


def regime(name: str | Regime) -> Regime:
    """The regime of that name, or a ValueError that lists the names. A `Regime` stands for itself."""
    if isinstance(name, Regime):
        return name
    if name not in REGIMES:
        raise ValueError(f"regime must be one of {', '.join(REGIMES)}, got {name!r}")
    return REGIMES[name]


def logit(probability: float) -> float:
    """The logit whose sigmoid is `probability`."""
    return math.log(probability) - math.log1p(-probability)
