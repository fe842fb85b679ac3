"""Which backend serves a request: the registry and the resolver.

The choice is made once, from plain values, and carries its reasons: why this one, and why each other one was passed
over. Backends are imported on first use, so that importing rapidkda loads none of them.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import checks, env
from .backends.base import Backend, LeadingBackend, Request
from .device import Device
from .errors import BackendUnavailable, ConfigConflict
from .problem import GateKind, Op

log = logging.getLogger("rapidkda")

# `auto` takes the first that can run: fastest first among those inside the accuracy bars, but for requests that one
# further down serves faster and says so (`LeadingBackend`). FlashKDA misses the bar where gates decay slowly, so it
# stands behind triton, which it beats where the GPU is full (README, performance).
# One line a backend: name, "module:class".
REGISTRY: dict[str, str] = {
    "cuda": "rapidkda.backends.cuda:CudaBackend",
    "triton": "rapidkda.backends.triton:TritonBackend",
    "flashkda": "rapidkda.backends.flashkda:FlashKdaBackend",
    "torch": "rapidkda.backends.torch:TorchBackend",
}
_GUESTS: dict[str, Backend] = {}
_GUEST_NUMBERS = itertools.count(1)
AUTO = "auto"
CONFIG_KEY = "kda_prefill_backend"
ENGINE_FLAG = "--kda-prefill-backend"
DECODE_CONFIG_KEY = "kda_decode_backend"
DECODE_ENGINE_FLAG = "--kda-decode-backend"


def backend_names() -> tuple[str, ...]:
    """Names that a caller may ask for, `auto` first."""
    return (AUTO, *REGISTRY)


def load(name: str) -> Backend:
    """The one instance of a backend. Importing a backend's folder must not need the packages it runs on."""
    return _GUESTS[name] if name in _GUESTS else _registered(name)


@functools.cache
def _registered(name: str) -> Backend:
    module, attribute = REGISTRY[name].split(":")
    backend: Backend = getattr(importlib.import_module(module), attribute)()
    return backend


@contextmanager
def guest(backend: Backend) -> Iterator[str]:
    """Let a backend that is not in the registry be asked for, by the name that is yielded; `auto` never takes it.

    For instruments that stand before or in the place of a real backend. A name is given once and never again, so that
    nothing that was decided for one guest is taken for another.
    """
    name = f"{backend.name}-{next(_GUEST_NUMBERS)}"
    _GUESTS[name] = backend
    try:
        yield name
    finally:
        del _GUESTS[name]


def is_guest(backend: Backend) -> bool:
    """Whether a backend stands in for others, and so must see every call."""
    return any(backend is guest for guest in _GUESTS.values())


@dataclass(frozen=True)
class Choice:
    """The outcome of a resolution.

    Attributes:
        name: the backend that serves the request.
        reason: why it was taken.
        source: where the wish came from ("auto", "argument", "environment variable ...", ...).
        passed_over: for each backend that `auto` tried before this one, all of its unmet requirements.
    """

    name: str
    reason: str
    source: str
    passed_over: Mapping[str, tuple[str, ...]]

    @property
    def backend(self) -> Backend:
        return load(self.name)

    def __str__(self) -> str:
        skipped = "".join(f"; {name} passed over: {', '.join(unmet)}" for name, unmet in self.passed_over.items())
        return f"{self.name} ({self.reason}){skipped}"


def check_name(name: object, source: str) -> str:
    """A known backend name, lower-cased, or a ValueError that lists the names."""
    if not isinstance(name, str):
        raise TypeError(f"{source} must be a backend name, got {type(name).__name__} {name!r}")
    lowered = name.strip().lower()
    if lowered not in backend_names() and lowered not in _GUESTS:
        raise ValueError(f"{source} must be one of {', '.join(backend_names())}, got {name!r}")
    return lowered


def resolve(request: Request, backend: str = AUTO, source: str = "auto") -> Choice:
    """Choose the backend for a request.

    A backend asked for by name runs or raises `BackendUnavailable` with all of its unmet requirements; there is no
    silent fallback. `auto` takes the first in its order that can run.
    """
    name = check_name(backend, source)
    if name != AUTO:
        unmet = load(name).unmet(request)
        if unmet:
            raise BackendUnavailable(f"backend {name!r} ({source}) cannot run {request.op} here:", {name: unmet})
        return Choice(name, f"asked for by {source}", source, {})
    passed_over: dict[str, tuple[str, ...]] = {}
    for candidate in auto_order(request):
        unmet = load(candidate).unmet(request)
        if not unmet:
            return Choice(candidate, "first in auto's order that can run here", source, passed_over)
        passed_over[candidate] = tuple(unmet)
    raise BackendUnavailable(f"no backend can run {request.op} here:", passed_over)


def auto_order(request: Request) -> list[str]:
    """The registry's order, but for backends that lead for this request."""

    def follows(name: str) -> bool:
        backend = load(name)
        return not (isinstance(backend, LeadingBackend) and backend.leads(request))

    return sorted(REGISTRY, key=follows)


@functools.lru_cache(maxsize=4096)
def resolve_cached(request: Request, backend: str, variable: str, argument: str = "backend") -> Choice:
    """`resolve` for the functional operators: one lookup a call once a kind of request has been seen.

    `variable`: the environment variable that names the backend; empty: an argument does, or nothing.
    """
    source = f"argument {argument}" if variable == "" else f"environment variable {variable}"
    choice = resolve(request, backend, source)
    log.debug("%s on %s: %s", request.op, request.device, choice)
    return choice


def wish(
    *,
    backend: str | None = None,
    engine_flag: str | None = None,
    additional_config: Mapping[str, Any] | None = None,
    variable: str = env.PREFILL_BACKEND,
    key: str = CONFIG_KEY,
    flag: str = ENGINE_FLAG,
) -> tuple[str, str]:
    """The backend that the configuration asks for, and by which source.

    Sources: an explicit argument, the engine flag, `additional_config[key]`, the environment variable; else `auto`. Two
    sources that name different backends raise `ConfigConflict`. `variable`, `key` and `flag` name the knob: by default
    the prefill backend's.
    """
    if additional_config is not None and not isinstance(additional_config, Mapping):
        raise TypeError(f"additional_config must be a mapping, got {type(additional_config).__name__}")
    configured = (additional_config or {}).get(key)
    sources = {
        "argument backend": backend,
        f"engine flag {flag}": engine_flag,
        f'additional_config["{key}"]': configured,
        f"environment variable {variable}": env.backend_name(variable),
    }
    named = {source: check_name(value, source) for source, value in sources.items() if value is not None}
    if len(set(named.values())) > 1:
        wishes = ", ".join(f"{source} asks for {value!r}" for source, value in named.items())
        raise ConfigConflict(f"conflicting backends: {wishes}; set one of them, or the same in all")
    for source, value in named.items():
        return value, source
    return AUTO, "auto"


def resolve_kda_prefill_backend(
    backend: str | None = None,
    *,
    engine_flag: str | None = None,
    additional_config: Mapping[str, Any] | None = None,
    device: torch.device | Device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    value_dim: int | None = None,
    lower_bound: float | None = None,
    state_dtype: torch.dtype = torch.float32,
    grouped_values: bool = False,
    checkpoints: bool = False,
) -> Choice:
    """Choose the prefill backend once, at construction, from every configuration source.

    Args:
        backend: explicit name, or None to look at the other sources.
        engine_flag: value of the engine's `--kda-prefill-backend`.
        additional_config: the engine's additional config; its key `kda_prefill_backend` is read.
        device: where the layer runs (default: the current CUDA device, else the CPU).
        dtype, head_dim, value_dim, state_dtype, grouped_values, checkpoints: what the layer is going to ask for.
        lower_bound: of the bounded gate; None means the unbounded softplus gate.

    Returns:
        A `Choice`; its text form says what was taken, why, and why each other backend was passed over.

    Raises:
        ValueError: an unknown name (lists the names), or a lower_bound outside [-5, 0).
        ConfigConflict: two sources disagree (names both).
        BackendUnavailable: the backend asked for cannot run (lists every unmet requirement).
    """
    name, source = wish(backend=backend, engine_flag=engine_flag, additional_config=additional_config)
    if lower_bound is not None:
        checks.lower_bound(lower_bound)
    gate: GateKind = "softplus" if lower_bound is None else "bounded"
    request = Request(
        op="prefill",
        device=as_device(device),
        dtype=dtype,
        key_dim=head_dim,
        value_dim=head_dim if value_dim is None else value_dim,
        gate=gate,
        state_dtype=state_dtype,
        grouped_values=grouped_values,
        checkpoints=checkpoints,
    )
    choice = resolve(request, name, source)
    log.info("KDA prefill backend on %s: %s", request.device, choice)
    return choice


def as_device(device: torch.device | Device | str | None) -> Device:
    """A device description from any way of naming one; None is the current CUDA device, else the CPU."""
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Device.of(torch.device(device))


def decision_table(request: Request, ops: tuple[Op, ...]) -> dict[Op, dict[str, tuple[str, ...]]]:
    """For each operator each backend's unmet requirements (empty: it can run), in auto's order. `doctor` prints it."""
    asked = {op: replace(request, op=op) for op in ops}
    return {op: {name: tuple(load(name).unmet(one)) for name in auto_order(one)} for op, one in asked.items()}
