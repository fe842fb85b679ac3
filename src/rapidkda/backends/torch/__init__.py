"""The torch backend: every operator on any device that torch runs on, and the only one with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import CommitCall, ConvCall, DecodeCall, NormCall, Op, PrefillCall, Sizes, Tokens, VerifyCall
from ...segments import Segments
from ..base import Request
from . import conv, norm, prefill, recurrent

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class TorchBackend:
    """Plain torch operators, float32 accumulation (float64 for float64 inputs)."""

    name = "torch"

    def unmet(self, request: Request) -> list[str]:
        reasons = []
        if request.dtype not in DTYPES:
            reasons.append(f"inputs must be bfloat16, float16, float32 or float64, got {_name(request.dtype)}")
        if request.op in ("prefill", "decode", "verify") and request.state_dtype not in STATE_DTYPES:
            reasons.append(f"states must be float32, bfloat16 or float64, got {_name(request.state_dtype)}")
        if request.requires_grad and request.op not in ("prefill", "decode"):
            reasons.append(f"{request.op} has no gradient; prefill and decode have one")
        return reasons

    def workspace_bytes(self, op: Op, sizes: Sizes) -> int:
        """0: scratch comes from torch's allocator."""
        return 0

    def forward(
        self, tokens: Tokens, segments: Segments, initial: Tensor | None = None, state_v_first: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Differentiable and out of place: outputs and last states, see `prefill.forward`."""
        return prefill.forward(tokens, segments, initial, state_v_first)

    def prefill(self, call: PrefillCall) -> None:
        with torch.no_grad():
            prefill.prefill(call)

    def decode(self, call: DecodeCall) -> None:
        with torch.no_grad():
            recurrent.decode(call)

    def verify(self, call: VerifyCall) -> None:
        with torch.no_grad():
            recurrent.verify(call)

    def commit(self, call: CommitCall) -> None:
        with torch.no_grad():
            recurrent.commit(call)

    def conv(self, call: ConvCall) -> None:
        with torch.no_grad():
            conv.conv(call)

    def norm(self, call: NormCall) -> None:
        with torch.no_grad():
            norm.norm(call)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
