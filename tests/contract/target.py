"""The backend under test, where it runs, and the operators bound to it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rapidkda import dispatch, ops
from rapidkda.backends.base import Backend, Request
from rapidkda.device import Device
from rapidkda.testing import Bar, Inputs, bar, case_bar

INTERPRETED_TOKENS = 40  # a Triton kernel under the interpreter is thousands of times slower


class NotHere(Exception):
    """A check that only means something on another device."""


@dataclass(frozen=True)
class Target:
    """A backend by name on a device. `dtype` is the most precise input dtype it takes."""

    name: str
    device: torch.device
    dtype: torch.dtype
    interpreted: bool = False

    @property
    def backend(self) -> Backend:
        return dispatch.load(self.name)

    def tokens(self, count: int) -> int:
        """`count`, or less where every token is dear."""
        return min(count, INTERPRETED_TOKENS) if self.interpreted else count

    def case_bar(self, state_dtype: torch.dtype = torch.float32) -> Bar:
        return case_bar(self.dtype, state_dtype)

    def bar(self, regime: str, dtype: torch.dtype | None = None, state_dtype: torch.dtype = torch.float32) -> Bar:
        return bar(regime, dtype or self.dtype, state_dtype)

    def prefill(self, inputs: Inputs, **options: Any) -> Tensor:
        options.setdefault("segments", inputs.segments)
        return ops.prefill(*inputs.operands(), **inputs.options(), backend=self.name, **options)

    def decode(self, inputs: Inputs, **options: Any) -> Tensor:
        options.setdefault("segments", inputs.segments)
        return ops.decode(*inputs.operands(), **inputs.options(), backend=self.name, **options)

    def verify(self, inputs: Inputs, **options: Any) -> Tensor:
        options.setdefault("segments", inputs.segments)
        return ops.verify(*inputs.operands(), **inputs.options(), backend=self.name, **options)

    def commit(self, **options: Any) -> None:
        options.setdefault("held", None)
        ops.commit(backend=self.name, **options)

    def advance(self, op: str, inputs: Inputs, *, state: Tensor, slots: Tensor, **options: Any) -> Tensor:
        """States that go on in their slots: by prefill, by decode, or by a verification of one token each, with a slot
        a position ("slots") or by replay and a commit of what it left ("replay", and "deferred" with more rows than
        tokens)."""
        if op in ("prefill", "decode"):
            run = self.prefill if op == "prefill" else self.decode
            return run(inputs, state=state, slots=slots, **options)
        none = torch.zeros_like(slots)
        if op == "slots":
            return self.verify(inputs, state=state, slots=slots[:, None], accepted=none, **options)
        heads, rows = inputs.v.shape[1], 3 if op == "deferred" else 1
        size = (state.shape[0], rows, heads, 2 * inputs.q.shape[2] + inputs.v.shape[2])
        kept = {"records": torch.full(size, float("nan"), device=self.device)}
        if op == "deferred":
            kept["held"] = torch.full((state.shape[0], heads), 2, dtype=torch.int32, device=self.device)
        out = self.verify(inputs, state=state, slots=slots, accepted=none, **kept, **options)
        layout = {name: options[name] for name in ("state_v_first", "pad_slot") if name in options}
        self.commit(state=state, slots=slots, accepted=none + 1, **kept, **layout)
        return out

    def chunk_kda(self, inputs: Inputs, **options: Any) -> tuple[Tensor, ...]:
        batched = [x[None] for x in inputs.operands()]
        return ops.chunk_kda(*batched, **{**inputs.options(), **options}, backend=self.name)

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
        return ops.causal_conv(x, weight, bias, backend=self.name, **options)

    def norm(self, x: Tensor, z: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return ops.gated_rms_norm(x, z, weight, backend=self.name, **options)

    def index(self, values: list[int] | list[bool], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def normal(self, *size: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(size, generator=self.generator(seed), device=self.device).to(dtype or self.dtype)


def find(name: str) -> Target | list[str]:
    """The backend's target on this machine, or why it cannot run here."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available() and name != "torch":
        devices.insert(0, torch.device("cuda", torch.cuda.current_device()))
    refusals: list[list[str]] = []
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16):
            unmet = dispatch.load(name).unmet(Request("prefill", Device.of(device), dtype))
            if not unmet:
                interpreted = name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
                return Target(name, device, dtype, interpreted)
            refusals.append(unmet)
    return min(refusals, key=len)
