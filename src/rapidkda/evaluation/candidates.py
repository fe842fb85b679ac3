"""What the battery compares with float32 torch: a backend, and how much of the model changes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from ..backends.base import Backend, Request
from ..device import Device
from ..dispatch import REGISTRY, guest, load, resolve
from ..errors import BackendUnavailable
from ..problem import ROLLBACKS, GateKind
from ..serving import BackendWish
from .operands import NarrowOperands

# operator: the model is float32, and its KDA operators run on bfloat16 operands. The difference is the backend's.
# model: all of the model is bfloat16, as it is served. Most of the difference is the model's own rounding.
Comparison = Literal["operator", "model"]
REFERENCE = BackendWish(prefill="torch", decode="torch")


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One thing to judge.

    Attributes:
        name: as tables show it.
        comparison: what changes with it.
        backends: what the engine asks for: names, or a backend of no registry.
    """

    name: str
    comparison: Comparison
    backends: BackendWish | Backend

    @contextmanager
    def installed(self) -> Iterator[BackendWish]:
        """What the engine asks for, while it can be asked for."""
        if isinstance(self.backends, BackendWish):
            yield self.backends
        else:
            with guest(self.backends) as name:
                yield BackendWish(prefill=name, decode=name)


def by_instrument(name: str, backend: Backend) -> Candidate:
    """A float32 model whose KDA layers run on a backend of no registry."""
    return Candidate(name, "operator", backend)


def reference() -> Candidate:
    """The torch backend in a float32 model."""
    return Candidate("torch-float32", "operator", REFERENCE)


def of_backend(name: str, comparison: Comparison, device: Device, gate: GateKind) -> Candidate:
    """A backend of the registry on a device.

    A backend that has not all of decode and verify is completed by the fastest one that has.

    Raises `BackendUnavailable` when it cannot run prefill of head dim 128 with this gate in bfloat16 here.
    """
    resolve(Request("prefill", device, gate=gate), name, "--backend")
    decode = next(one for one in (name, *REGISTRY) if _decodes(one, device, gate))
    shown = name if decode == name else f"{name}+{decode}"
    if comparison == "model":
        return Candidate(shown, comparison, BackendWish(prefill=name, decode=decode))
    return Candidate(shown, comparison, NarrowOperands(f"{shown} on bf16", load(name), load(decode), load("torch")))


def _decodes(name: str, device: Device, gate: GateKind) -> bool:
    """Whether a backend has decode and verify, either form of it."""
    asked = [Request("decode", device, gate=gate)]
    asked += [Request("verify", device, gate=gate, rollback=rollback) for rollback in ROLLBACKS]
    return not any(load(name).unmet(request) for request in asked)


def runnable(device: Device, gate: GateKind) -> list[str]:
    """Names of the backends that can run prefill here, in the order of the registry."""
    names = []
    for name in REGISTRY:
        try:
            resolve(Request("prefill", device, torch.bfloat16, gate=gate), name, "--backend")
        except BackendUnavailable:
            continue
        names.append(name)
    return names
