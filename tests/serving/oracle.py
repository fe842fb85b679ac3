"""The layer in float64, one request at a time and one token after another: what every step is judged against."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rapidkda import reference
from rapidkda.backends.base import Request
from rapidkda.device import Device
from rapidkda.dispatch import AUTO, load
from rapidkda.problem import GateKind
from rapidkda.serving import BackendWish, KDALayer, StatePool, StepLimits, Workspace
from rapidkda.testing.tolerances import bar, case_bar

HIDDEN = 32


@dataclass(frozen=True)
class Target:
    """What the layers of these tests run on, and the bars that go with it."""

    backend: str
    device: str
    dtype: torch.dtype
    dim: int
    out: float
    state: float


def find_target() -> Target:
    """The torch backend in float32, or the backend that RAPIDKDA_TEST_BACKEND names, in bfloat16, on a GPU if any."""
    name = os.environ.get("RAPIDKDA_TEST_BACKEND", "torch")
    if name == "torch":
        single = torch.float32
        return Target(name, "cpu", single, 16, case_bar(single).out, bar("slow", single).state)
    on_gpu = torch.cuda.is_available()
    # Projections, convolution, KDA, norm and output each round once to bfloat16.
    return Target(name, "cuda" if on_gpu else "cpu", torch.bfloat16, 128 if on_gpu else 64, 2e-2, 2e-2)


TARGET = find_target()
WISH = BackendWish(prefill=TARGET.backend, decode=TARGET.backend)


def wish_or_skip(backend: str, device: str, dim: int, gates: tuple[GateKind, ...]) -> BackendWish:
    """A layer in bfloat16 with its prefill on that backend, and its decode too where the backend has one: else on the
    fastest that has."""
    for gate in gates:
        request = Request("prefill", Device.of(torch.device(device)), torch.bfloat16, dim, dim, gate, checkpoints=True)
        if unmet := load(backend).unmet(request):
            pytest.skip(f"{backend} cannot run prefill: {'; '.join(unmet)}")
    decodes = not any(load(backend).unmet(replace(request, op=op, checkpoints=False)) for op in ("decode", "verify"))
    return BackendWish(prefill=backend, decode=backend if decodes else AUTO)


only_on_torch = pytest.mark.skipif(TARGET.backend != "torch", reason="about the host's part: run on the torch backend")


@dataclass(frozen=True)
class State:
    """What one request carries between steps, in float64."""

    recurrent: Tensor  # [H, K, V]
    history: Tensor  # [W - 1, C], oldest first


class Oracle:
    """A KDA layer by the reference's formulas, from the same weights."""

    def __init__(self, layer: KDALayer):
        self.layer = layer
        heads, dim = layer.num_heads, layer.head_dim
        width = heads * dim
        q, k, v, self.f_a, self.g_a, self.b = layer.in_proj.double()[: 3 * width + 2 * dim + heads].split(
            [width, width, width, dim, dim, heads]
        )
        self.qkv = torch.cat([q, k, v])

    def fresh(self) -> State:
        layer = self.layer
        heads, dim = layer.num_heads, layer.head_dim
        options = {"dtype": torch.float64, "device": layer.in_proj.device}
        return State(
            torch.zeros(heads, dim, dim, **options),  # type: ignore[arg-type]
            torch.zeros(layer.shape.conv_width - 1, 3 * heads * dim, **options),  # type: ignore[arg-type]
        )

    def run(self, hidden: Tensor, state: State) -> tuple[Tensor, list[State]]:
        """hidden [n, hidden_size]; returns the outputs [n, hidden_size] and the state after every token."""
        layer, heads, dim = self.layer, self.layer.num_heads, self.layer.head_dim
        hidden = hidden.double()
        x = hidden @ self.qkv.T
        mixed, _ = reference.causal_conv(x, layer.conv_weight, history=state.history)
        q, k, v = (part.unflatten(1, (heads, dim)) for part in mixed.split(heads * dim, dim=1))
        q, k = reference.l2_normalize(q), reference.l2_normalize(k)
        raw = (hidden @ self.f_a.T @ layer.f_b_proj.double().T).unflatten(1, (heads, dim))
        g = reference.gate_log_decay(raw, layer.A_log, layer.dt_bias, layer.lower_bound)
        beta = torch.sigmoid(hidden @ self.b.T) * (2.0 if layer.allow_neg_eigval else 1.0)
        z = (hidden @ self.g_a.T @ layer.g_b_proj.double().T).unflatten(1, (heads, dim))
        padded = torch.cat([state.history, x])
        core, states, recurrent = [], [], state.recurrent
        for t in range(hidden.shape[0]):
            one = slice(t, t + 1)
            out, recurrent = reference.recurrence(q[one], k[one], v[one], g[one], beta[one], dim**-0.5, recurrent)
            core.append(out)
            states.append(State(recurrent, padded[t + 1 : t + layer.shape.conv_width]))
        outputs = torch.cat(core) if core else q.new_zeros(0, heads, dim)
        normed = reference.gated_rms_norm(outputs, z, layer.o_norm, layer.eps)
        return normed.flatten(1) @ layer.o_proj.double().T, states


def make_layer(
    seed: int = 0,
    *,
    hidden: int = HIDDEN,
    heads: int = 2,
    dim: int = TARGET.dim,
    lower_bound: float | None = -5.0,
    dtype: torch.dtype = TARGET.dtype,
    weak_gates: bool = True,
    **options: object,
) -> KDALayer:
    """A seeded layer. Weak gates (log decay about -0.01) keep every past token visible in the state."""
    generator = torch.Generator().manual_seed(seed)
    chosen = {"backends": WISH, "device": TARGET.device, **options}
    layer = KDALayer(hidden, heads, dim, lower_bound=lower_bound, dtype=dtype, **chosen)  # type: ignore[arg-type]
    for name, parameter in layer.named_parameters():
        fan_in = parameter.shape[-1]
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
        if name == "o_norm":
            parameter.copy_(1.0 + 0.1 * torch.randn(parameter.shape, generator=generator))
    layer.A_log.copy_(0.3 * torch.randn(layer.A_log.shape, generator=generator))
    if weak_gates:
        layer.dt_bias.copy_(torch.rand(layer.dt_bias.shape, generator=generator) - 6.5)
    return layer


def make_workspace(layer: KDALayer, pool: StatePool, limits: StepLimits, **options: object) -> Workspace:
    """A workspace for a layer's steps over a pool, poisoned."""
    workspace = Workspace(pool.shape, limits, layer.choices["prefill"], dtype=layer.in_proj.dtype, **options)  # type: ignore[arg-type]
    workspace.fill(255)
    return workspace


def snapshot(pool: StatePool) -> list[Tensor]:
    """All bytes of a pool."""
    return [value.clone().view(torch.uint8) for state in pool.layers for value in state.tensors().values()]


def changed_slots(pool: StatePool, before: list[Tensor]) -> set[int]:
    """Slots any byte of which differs from a snapshot."""
    changed: set[int] = set()
    now = [value.view(torch.uint8) for state in pool.layers for value in state.tensors().values()]
    for old, new in zip(before, now, strict=True):
        changed.update(torch.nonzero((old != new).flatten(1).any(1)).flatten().tolist())
    return changed


def resting_state(pool: StatePool, slot: int, layer: int = 0) -> State:
    """The settled state of a slot in the oracle's layout."""
    state = pool.layers[layer]
    history = state.conv[slot] if pool.shape.conv_channels_last else state.conv[slot].T
    return State(state.recurrent[slot].double().transpose(-1, -2), history[: pool.shape.conv_width - 1].double())
