"""Operands that a model's KDA layers saw on real text, as a file and as a regime.

Random gates do not look like trained ones: trained heads mix channels that forget at once with channels that keep
thousands of tokens, and their keys are correlated. A file that `rapidkda capture` wrote stands wherever a regime does.

The file is safetensors. For each layer L: `L.q`, `L.k`, `L.v`, `L.g` [T, H, 128], `L.beta` [T, H], raw as the
projections give them; `L.A_log` [H], `L.dt_bias` [H, K], where the gate has them; `L.state` [H, V, K], float32, what
the text before left. The metadata hold `format`, `lower_bound` and where the text came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .regimes import Raw, Regime
from .shapes import Shape

FORMAT = "rapidkda-capture-1"
NAME = "captured"  # of the regime
OPERANDS = ("q", "k", "v", "g", "beta")
UNBOUNDED = "none"  # lower_bound of the softplus gate, in the metadata


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """The heads of all captured layers side by side.

    Attributes:
        q, k, v, g: [T, H, K], beta: [T, H].
        A_log: [H], dt_bias: [H, K]; zeros where the gate has none.
        states: [H, V, K].
        lower_bound: of the bounded gate, or None.
        origin: the file's metadata.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    states: Tensor
    lower_bound: float | None
    origin: Mapping[str, str]

    def fits(self, shape: Shape) -> bool:
        """Whether a workload has the file's head dims."""
        return (shape.key_dim, shape.value_dim) == (self.q.shape[2], self.v.shape[2])

    def regime(self) -> Regime:
        """A regime that takes its operands from the file, for any workload of its head dims.

        Each sequence starts at a random token of the file and starts over at its end; heads beyond the file's are its
        first ones again.
        """
        tokens, heads = self.beta.shape
        summary = f"captured from a model, {tokens} tokens, {heads} heads"
        return Regime(NAME, summary, self.lower_bound, partial(_fill, self))


def _fill(captured: Captured, raw: Raw, shape: Shape, generator: torch.Generator) -> None:
    if not captured.fits(shape):
        dims = captured.q.shape[2], captured.v.shape[2]
        raise ValueError(
            f"shape must have the captured head dims {dims}, got {shape.name} with {(shape.key_dim, shape.value_dim)}"
        )
    device = generator.device
    tokens, heads = captured.beta.shape
    starts = torch.randint(tokens, (len(shape.seq_lens),), generator=generator, device=device)
    rows = torch.cat([start + torch.arange(length, device=device) for start, length in zip(starts, shape.seq_lens)])
    rows = rows % tokens
    value_heads = torch.arange(shape.hv, device=device) % heads
    key_heads = value_heads[:: shape.hv // shape.heads]

    def pick(x: Tensor, columns: Tensor) -> Tensor:
        return x.to(device).index_select(1, columns).index_select(0, rows).float()

    raw.q, raw.k = pick(captured.q, key_heads), pick(captured.k, key_heads)
    raw.v, raw.g, raw.beta = (pick(x, value_heads) for x in (captured.v, captured.g, captured.beta))
    raw.A_log, raw.dt_bias = captured.A_log.to(device)[value_heads], captured.dt_bias.to(device)[value_heads]
    raw.states = captured.states.to(device)[value_heads].expand(len(shape.seq_lens), -1, -1, -1).clone()


def save(path: Path, layers: Mapping[int, Mapping[str, Tensor]], lower_bound: float | None, origin: Any) -> None:
    """Write a file: tensors of each layer by their short names, and where they came from as strings by name."""
    named = {f"{layer}.{name}": x.cpu().contiguous() for layer, part in layers.items() for name, x in part.items()}
    bound = UNBOUNDED if lower_bound is None else repr(float(lower_bound))
    save_file(
        named, path, {**{key: str(value) for key, value in origin.items()}, "format": FORMAT, "lower_bound": bound}
    )


def load(path: Path) -> Captured:
    """Read a file. Raises ValueError that says what is wrong with it."""
    try:
        with safe_open(str(path), framework="pt") as file:
            origin = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} must be a file of rapidkda capture: {error}") from error
    if origin.get("format") != FORMAT:
        raise ValueError(f"{path} must be a file of rapidkda capture ({FORMAT}), got {origin.get('format')!r}")
    layers = sorted({name.split(".")[0] for name in tensors}, key=int)
    try:
        q, k, v, g, beta = (torch.cat([tensors[f"{layer}.{x}"] for layer in layers], dim=1) for x in OPERANDS)
        states = torch.cat([tensors[f"{layer}.state"] for layer in layers])
    except (KeyError, RuntimeError) as error:
        raise ValueError(
            f"{path} must hold q, k, v, g, beta and state of every layer, alike in size: {error}"
        ) from error
    heads = [tensors[f"{layer}.beta"].shape[1] for layer in layers]
    A_log, dt_bias = (
        torch.cat([tensors.get(f"{layer}.{name}", torch.zeros(n, *tail)) for layer, n in zip(layers, heads)])
        for name, tail in (("A_log", ()), ("dt_bias", (g.shape[2],)))
    )
    bound = origin["lower_bound"]
    return Captured(q, k, v, g, beta, A_log, dt_bias, states, None if bound == UNBOUNDED else float(bound), origin)
