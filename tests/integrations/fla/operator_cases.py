"""The calls that flash-linear-attention's users make of its KDA operators, with its own naive form as the reference.

Shapes, scales, gates and the bar are those that fla itself is held to: positive queries and keys, decays of channels
from `logsigmoid`, masks of channels that do not decay, and packed sequences. Bfloat16 cases are rapidkda's addition:
they are what served models use, and the only ones that its Hopper kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from fla.ops.kda.naive import naive_recurrent_kda
from torch import Tensor

FLA_BAR = 0.005  # relative root mean square error of outputs and final states


@dataclass(frozen=True)
class Case:
    """One call. `cu_seqlens` packs sequences into a batch of one; `masked` is the share of channels without decay."""

    batch: int
    tokens: int
    heads: int
    dim: int
    dtype: torch.dtype
    scale: float | None = None
    normalizer: float = 1.0
    masked: float = 0.0
    norm_in_kernel: bool = False
    gate_in_kernel: bool = False
    cu_seqlens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        flags = [name for name in ("norm_in_kernel", "gate_in_kernel", "cu_seqlens") if getattr(self, name)]
        sizes = f"{self.batch}x{self.tokens}-h{self.heads}-d{self.dim}"
        return "-".join([sizes, str(self.dtype).removeprefix("torch."), *flags])


half, single, bfloat = torch.float16, torch.float32, torch.bfloat16
PACKED = (0, 256, 500, 1000)
SMALL = (
    Case(1, 63, 1, 64, half, scale=1.0),
    Case(2, 130, 3, 60, half, scale=1.0),
    Case(2, 200, 3, 64, half, scale=0.1, masked=0.5),
    Case(1, 150, 4, 128, half, scale=0.1, normalizer=10.0, gate_in_kernel=True),
    Case(1, 64, 1, 64, single, scale=1.0),
    Case(2, 128, 3, 60, single, scale=1.0, norm_in_kernel=True),
    Case(1, 300, 2, 64, half, cu_seqlens=(0, 15, 100, 300)),
    Case(1, 128, 2, 128, bfloat, norm_in_kernel=True, gate_in_kernel=True),
)
LARGE = (
    Case(2, 500, 3, 60, half, scale=1.0),
    Case(2, 1000, 3, 64, half, scale=0.1, masked=0.5),
    Case(3, 1024, 4, 100, half, scale=1.0, normalizer=0.1),
    Case(4, 1024, 4, 128, half, scale=0.1),
    Case(4, 1024, 4, 128, half, scale=0.1, norm_in_kernel=True),
    Case(2, 1500, 4, 128, half, scale=0.1, normalizer=10.0, gate_in_kernel=True),
    Case(4, 2048, 8, 64, half, scale=0.1, gate_in_kernel=True),
    Case(4, 1024, 4, 128, single, scale=0.1),
    Case(4, 1024, 4, 128, single, scale=1.0, normalizer=10.0),
    Case(1, 1000, 4, 64, half, cu_seqlens=PACKED),
    Case(1, 1000, 4, 128, half, masked=0.5, cu_seqlens=PACKED),
    Case(1, 2000, 4, 100, half, cu_seqlens=(0, 15, 100, 300, 1200, 2000)),
    Case(4, 1024, 4, 128, bfloat, norm_in_kernel=True, gate_in_kernel=True),
    Case(2, 1500, 8, 128, bfloat, scale=0.1, norm_in_kernel=True),
    Case(1, 1000, 4, 128, bfloat, norm_in_kernel=True, gate_in_kernel=True, cu_seqlens=PACKED),
)


def arguments(case: Case, device: str) -> dict[str, Any]:
    """What is passed to `chunk_kda`, by name."""
    generator = torch.Generator().manual_seed(case.tokens)
    shape = (case.batch, case.tokens, case.heads, case.dim)

    def uniform(*sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=generator).to(case.dtype)

    q, k, v = uniform(*shape), uniform(*shape), uniform(*shape)
    g = torch.randn(*shape, generator=generator)
    gate: dict[str, Any] = {}
    if case.gate_in_kernel:
        gate = {
            "A_log": torch.randn(case.heads, generator=generator),
            "dt_bias": torch.randn(case.heads * case.dim, generator=generator),
            "use_gate_in_kernel": True,
        }
    else:
        g = F.logsigmoid(g) / case.normalizer
        g = g * (torch.rand(*shape, generator=generator) > case.masked)
    if not case.norm_in_kernel:
        q, k = (F.normalize(x.float(), dim=-1).to(case.dtype) for x in (q, k))
    sequences = case.batch if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    call = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": torch.randn(*shape[:3], generator=generator).to(case.dtype).sigmoid(),
        "initial_state": torch.randn(sequences, case.heads, case.dim, case.dim, generator=generator),
        **gate,
    }
    call = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}
    if case.cu_seqlens is not None:
        call["cu_seqlens"] = torch.tensor(case.cu_seqlens, device=device)
    call |= {"scale": case.scale, "output_final_state": True, "use_qk_l2norm_in_kernel": case.norm_in_kernel}
    return call


def naive(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """fla's reference of the same call, sequence by sequence, in float64 but for what it casts itself."""
    q, k = call["q"], call["k"]
    if call["use_qk_l2norm_in_kernel"]:
        q, k = (F.normalize(x.float(), dim=-1) for x in (q, k))
    g = call["g"]
    if call.get("use_gate_in_kernel"):
        rate = -call["A_log"].exp()[:, None]
        g = rate * F.softplus(g + call["dt_bias"].view(g.shape[-2:]))
    bounds = call["cu_seqlens"].tolist() if "cu_seqlens" in call else None
    parts: list[tuple[Tensor, Tensor]] = []
    for row in range(len(call["initial_state"]) if bounds else 1):
        rows = slice(bounds[row], bounds[row + 1]) if bounds else slice(None)
        state = call["initial_state"][row : row + 1] if bounds else call["initial_state"]
        tensors = (x[:, rows] for x in (q, k, call["v"].float(), g, call["beta"]))
        parts.append(naive_recurrent_kda(*tensors, call["scale"], state, output_final_state=True))
    return torch.cat([o for o, _ in parts], dim=1), torch.cat([state for _, state in parts])
