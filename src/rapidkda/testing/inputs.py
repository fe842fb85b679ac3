"""Inputs for every operator, seeded, in any dtype, on any device, dense or as the strided slices that engines pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .. import reference
from ..segments import Segments
from .regimes import Raw, Regime
from .regimes import regime as regime_by_name
from .shapes import Shape

Layout = Literal["dense", "fused"]


@dataclass(slots=True, eq=False)
class Inputs:
    """Operands of one KDA call on a step's token axis, with its segments and initial states.

    `operands()` and `options()` are what `rapidkda.ops.prefill`, `decode` and `verify` take; `expected()` is the
    float64 answer. Rows that no segment covers hold NaN.
    """

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV, K]
    beta: Tensor  # [T, HV]
    segments: Segments
    states: Tensor  # [N, HV, V, K] float32, what each segment starts from
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    lower_bound: float | None = None
    raw_gate: bool = True
    raw_beta: bool = True
    raw_keys: bool = True
    allow_neg_eigval: bool = False
    scale: float | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)  # (first token, length) of each segment

    def __post_init__(self) -> None:
        first, length = self.segments.host_values()
        self.spans = [(int(f), int(n)) for f, n in zip(first, length, strict=True)]

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.g, self.beta

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the KDA operators that say how to read the operands."""
        return {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.lower_bound,
            "scale": self.scale,
            "use_gate_in_kernel": self.raw_gate,
            "use_beta_sigmoid_in_kernel": self.raw_beta,
            "use_qk_l2norm_in_kernel": self.raw_keys,
            "allow_neg_eigval": self.allow_neg_eigval,
        }

    def expected(
        self,
        sequences: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Float64 outputs [T, HV, V] (zeros outside the segments) and final states [N, HV, V, K], on the host.

        `sequences` and `heads` (value heads) select what is computed, in that order of rows; then only those rows of
        the results are meaningful: outputs [T, len(heads), V], states [len(sequences), len(heads), V, K].
        """
        chosen = range(len(self.spans)) if sequences is None else sequences
        value_heads = list(range(self.v.shape[1]) if heads is None else heads)
        group = self.v.shape[1] // self.q.shape[1]
        key_heads = [head // group for head in value_heads]
        starts = self.states if states is None else states
        out = torch.zeros(self.v.shape[0], len(value_heads), self.v.shape[2], dtype=torch.float64)
        final = []
        for n in chosen:
            first, length = self.spans[n]
            rows = slice(first, first + length)
            q, k = (x[rows][:, key_heads].cpu()[None] for x in (self.q, self.k))
            v, g, beta = (x[rows][:, value_heads].cpu()[None] for x in (self.v, self.g, self.beta))
            o, state = reference.kda(
                q,
                k,
                v,
                g,
                beta,
                scale=self.scale,
                initial_state=starts[n][value_heads].cpu()[None],
                use_qk_l2norm=self.raw_keys,
                use_gate=self.raw_gate,
                A_log=None if self.A_log is None else self.A_log.flatten()[value_heads].cpu(),
                dt_bias=None if self.dt_bias is None else self.dt_bias.reshape(self.v.shape[1], -1)[value_heads].cpu(),
                lower_bound=self.lower_bound,
                use_beta_sigmoid=self.raw_beta,
                allow_neg_eigval=self.allow_neg_eigval,
                state_v_first=True,
            )
            out[rows] = o[0]
            final.append(state[0])
        shape = (0, len(value_heads), *self.states.shape[2:])
        return out, torch.stack(final) if final else torch.zeros(shape, dtype=torch.float64)

    def clone(self) -> Inputs:
        """A copy whose operands share no memory with these; strides become dense."""
        return replace(self, **{name: getattr(self, name).clone() for name in ("q", "k", "v", "g", "beta", "states")})


def make_inputs(
    shape: Shape,
    regime: str | Regime = "slow",
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    layout: Layout = "dense",
    g_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype | None = None,
    gaps: bool = False,
) -> Inputs:
    """Raw inputs of a regime for a workload.

    Args:
        dtype: of q, k, v; `g_dtype` and `beta_dtype` default to it.
        layout: "fused" makes q, k, v column slices of one buffer, and g and beta slices of padded ones.
        gaps: segments in reverse order on the token axis, with NaN rows between them and at both ends.
    """
    chosen = regime_by_name(regime)
    generator = torch.Generator(device).manual_seed(seed)
    raw = chosen.generate(shape, generator)
    states = raw.states
    if states is None:
        extents = (len(shape.seq_lens), shape.hv, shape.value_dim, shape.key_dim)
        states = 0.1 * torch.randn(extents, generator=generator, device=device)
    first_token, rows = _placement(shape.seq_lens, gaps)
    segments = Segments.from_lengths(shape.seq_lens, device, first_token)
    operands = _place(raw, shape, first_token, rows, dtype, g_dtype or dtype, beta_dtype or dtype, layout)
    return Inputs(
        *operands,
        segments=segments,
        states=states,
        A_log=raw.A_log,
        dt_bias=raw.dt_bias,
        lower_bound=chosen.lower_bound,
    )


def activated(
    lens: Sequence[int],
    log_decay: float | Tensor = -0.01,
    *,
    heads: int = 2,
    value_heads: int | None = None,
    key_dim: int = 128,
    value_dim: int = 128,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    layout: Layout = "dense",
    gaps: bool = False,
) -> Inputs:
    """Inputs after their activations: unit q and k, log decay (a constant, or [T, HV, K]), beta in (0, 1)."""
    shape = Shape("activated", tuple(lens), heads, value_heads, key_dim, value_dim)
    plain = Regime("activated", "", None, lambda raw, shape, generator: None)
    generator = torch.Generator(device).manual_seed(seed)
    raw = plain.generate(shape, generator)
    raw.q, raw.k = (reference.l2_normalize(x).float() for x in (raw.q, raw.k))
    raw.beta = raw.beta.sigmoid()
    raw.g = torch.full_like(raw.g, log_decay) if isinstance(log_decay, float) else log_decay.to(raw.g)
    states = 0.1 * torch.randn((len(lens), shape.hv, value_dim, key_dim), generator=generator, device=device)
    first_token, rows = _placement(shape.seq_lens, gaps)
    operands = _place(raw, shape, first_token, rows, dtype, torch.float32, torch.float32, layout)
    return Inputs(
        *operands,
        segments=Segments.from_lengths(shape.seq_lens, device, first_token),
        states=states,
        raw_gate=False,
        raw_beta=False,
        raw_keys=False,
    )


def _placement(lens: Sequence[int], gaps: bool) -> tuple[list[int], int]:
    """First token of each segment and the rows of the token axis."""
    if not gaps:
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(int).tolist()
        return starts[:-1], starts[-1]
    position, first = 3, [0] * len(lens)
    for n in reversed(range(len(lens))):
        first[n] = position
        position += lens[n] + 1 + n % 3
    return first, position + 5


def _place(
    raw: Raw,
    shape: Shape,
    first_token: Sequence[int],
    rows: int,
    dtype: torch.dtype,
    g_dtype: torch.dtype,
    beta_dtype: torch.dtype,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Copy the packed operands to their rows of NaN-filled buffers, dense or slices of fused ones."""
    device = raw.q.device
    key_columns, value_columns = shape.heads * shape.key_dim, shape.hv * shape.value_dim
    gate_columns = shape.hv * shape.key_dim

    def buffer(columns: int, kind: torch.dtype) -> Tensor:
        return torch.full((rows, columns), float("nan"), dtype=kind, device=device)

    if layout == "fused":
        qkv = buffer(2 * key_columns + value_columns, dtype)
        q, k, v = qkv.split([key_columns, key_columns, value_columns], dim=1)
        g = buffer(gate_columns + 64, g_dtype)[:, 32 : 32 + gate_columns]
        beta = buffer(3 * shape.hv, beta_dtype)[:, shape.hv : 2 * shape.hv]
    else:
        q, k = buffer(key_columns, dtype), buffer(key_columns, dtype)
        v, g, beta = buffer(value_columns, dtype), buffer(gate_columns, g_dtype), buffer(shape.hv, beta_dtype)
    q, k = q.unflatten(1, (shape.heads, shape.key_dim)), k.unflatten(1, (shape.heads, shape.key_dim))
    v, g = v.unflatten(1, (shape.hv, shape.value_dim)), g.unflatten(1, (shape.hv, shape.key_dim))
    packed = 0
    for first, length in zip(first_token, shape.seq_lens, strict=True):
        for target, source in ((q, raw.q), (k, raw.k), (v, raw.v), (g, raw.g), (beta, raw.beta)):
            target[first : first + length] = source[packed : packed + length]
        packed += length
    return q, k, v, g, beta
