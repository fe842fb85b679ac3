"""Inputs of the layer benchmark: steps, their projections, pools, and float64 answers for single requests and heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .. import reference
from ..serving import Rollback, StatePool, StateShape
from ..testing.regimes import regime as regime_by_name
from ..testing.shapes import Shape

EPS = 1e-5
CONV_WIDTH = 4

Kind = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True)
class Step:
    """The requests of one step: (kind, tokens) in engine order, which is sorted by nothing."""

    name: str
    requests: tuple[tuple[Kind, int], ...]
    heads: int
    head_dim: int = 128

    @property
    def drafts(self) -> int:
        """k_max."""
        return max((tokens - 1 for kind, tokens in self.requests if kind == "verify"), default=0)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.requests)


def _mixed(prefills: int, tokens: int, verifies: int, drafts: int, decodes: int, heads: int, dim: int = 128) -> Step:
    """Prefills between verifications and decodes, taken in turn."""
    kinds: list[list[tuple[Kind, int]]] = [
        [("prefill", tokens)] * prefills,
        [("verify", 1 + drafts)] * verifies,
        [("decode", 1)] * decodes,
    ]
    turns = max(len(kind) for kind in kinds)
    order = [kind[turn] for turn in range(turns) for kind in kinds if turn < len(kind)]
    name = f"mixed_{prefills}x{tokens}+{verifies}x{1 + drafts}+{decodes}_h{heads}"
    return Step(name, tuple(order), heads, dim)


def _pure(prefills: int, tokens: int, heads: int, dim: int = 128) -> Step:
    return Step(f"pure_{prefills}x{tokens}_h{heads}", (("prefill", tokens),) * prefills, heads, dim)


GPU_STEPS = (_pure(8, 2048, 16), _mixed(4, 2048, 64, 3, 32, 16))
CPU_STEPS = (_pure(2, 512, 4), _mixed(2, 256, 16, 3, 8, 4))


@dataclass(slots=True, eq=False)
class StepInputs:
    """Projections of a step, as slices of one buffer, and the layer's parameters."""

    step: Step
    x: Tensor  # [T, C]
    g: Tensor  # [T, H, K]
    z: Tensor  # [T, H, V]
    beta: Tensor  # [T, H]
    conv_weight: Tensor
    norm_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    states: Tensor  # [N, H, V, K]
    histories: Tensor  # [N, W - 1, C]

    @property
    def gate(self) -> dict[str, Any]:
        """The gate's arguments as the operators take them."""
        return {"A_log": self.A_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound}


@dataclass(slots=True, eq=False)
class Bound:
    """One implementation on one step: the call, its outputs [T, H, V] and the states that it leaves by request."""

    call: Callable[[], None]
    out: Tensor
    reset: Callable[[], None]
    state_of: Callable[[int], Tensor]


def make_inputs(step: Step, regime: str, device: torch.device, dtype: torch.dtype, seed: int) -> StepInputs:
    shape = Shape(
        step.name, tuple(tokens for _, tokens in step.requests), step.heads, None, step.head_dim, step.head_dim
    )
    generator = torch.Generator(device).manual_seed(seed)
    kind = regime_by_name(regime)
    raw = kind.generate(shape, generator)
    width = step.heads * step.head_dim
    z = torch.randn(step.tokens, width, generator=generator, device=device)
    parts = [raw.q.flatten(1), raw.k.flatten(1), raw.v.flatten(1), raw.g.flatten(1), z, raw.beta]
    x, g, z, beta = torch.cat(parts, dim=1).to(dtype).split([3 * width, width, width, step.heads], dim=1)
    count = len(step.requests)
    heads = (step.heads, step.head_dim)
    return StepInputs(
        step=step,
        x=x,
        g=g.unflatten(1, heads),
        z=z.unflatten(1, heads),
        beta=beta,
        conv_weight=torch.randn(3 * width, CONV_WIDTH, generator=generator, device=device) * CONV_WIDTH**-0.5,
        norm_weight=torch.ones(step.head_dim, device=device),
        A_log=raw.A_log,
        dt_bias=raw.dt_bias,
        lower_bound=kind.lower_bound,
        states=0.1 * torch.randn(count, step.heads, step.head_dim, step.head_dim, generator=generator, device=device),
        histories=torch.randn(count, CONV_WIDTH - 1, 3 * width, generator=generator, device=device).to(dtype),
    )


def make_pool(inputs: StepInputs, rollback: Rollback) -> tuple[StatePool, list[tuple[int, ...]]]:
    """A pool over the step's requests, their slots in no particular order."""
    step = inputs.step
    shape = StateShape(
        heads=step.heads,
        key_dim=step.head_dim,
        value_dim=step.head_dim,
        conv_width=CONV_WIDTH,
        conv_dtype=inputs.x.dtype,
        max_drafts=step.drafts,
        rollback=rollback,
    )
    each = shape.slots_per_request
    pool = StatePool(shape, len(step.requests) * each + 1, device=inputs.x.device)
    slots = [pool.allocate(index) for index in range(len(step.requests))]
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(1)).tolist()
    return pool, [slots[index] for index in order]


def fill_pool(pool: StatePool, slots: Sequence[tuple[int, ...]], inputs: StepInputs) -> None:
    """Poison everything, then set the states that the requests start from."""
    pool.fill(range(pool.num_slots), float("nan"))
    resting = torch.tensor([own[0] for own in slots], device=pool.device)
    pool.layers[0].recurrent[resting] = inputs.states
    pool.layers[0].conv[resting, : CONV_WIDTH - 1] = inputs.histories


def expected(inputs: StepInputs, index: int, span: slice, head: int) -> tuple[Tensor, Tensor]:
    """Float64 output [n, V] and last state [V, K] of one request and one head."""
    step, dim = inputs.step, inputs.step.head_dim
    width = step.heads * dim
    columns = torch.cat([torch.arange(part * width + head * dim, part * width + (head + 1) * dim) for part in range(3)])
    columns = columns.to(inputs.x.device)
    mixed, _ = reference.causal_conv(
        inputs.x[span][:, columns].cpu(),
        inputs.conv_weight[columns].cpu(),
        history=inputs.histories[index][:, columns].cpu(),
    )
    q, k, v = (part.unsqueeze(1) for part in mixed.chunk(3, dim=1))
    one = slice(head, head + 1)
    g = reference.gate_log_decay(
        inputs.g[span, one].cpu(), inputs.A_log[one].cpu(), inputs.dt_bias[one].cpu(), inputs.lower_bound
    )
    out, state = reference.recurrence(
        reference.l2_normalize(q),
        reference.l2_normalize(k),
        v,
        g,
        inputs.beta[span, one].cpu().double().sigmoid(),
        dim**-0.5,
        inputs.states[index, one].cpu().transpose(-1, -2),
    )
    z = inputs.z[span, one].cpu()
    normed = reference.gated_rms_norm(out, z, inputs.norm_weight.cpu(), EPS)
    return normed[:, 0], state[0].T


def moved_bytes(inputs: StepInputs) -> int:
    """Bytes that must move: x, g, beta, z read and the output written once; states and histories both."""
    tokens = sum(part.numel() for part in (inputs.x, inputs.g, inputs.beta, inputs.z, inputs.z))
    histories = 2 * inputs.histories.numel()
    return (tokens + histories) * inputs.x.element_size() + 2 * inputs.states.numel() * 4
