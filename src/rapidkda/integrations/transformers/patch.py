"""Put rapidkda into a transformers model, and take it out again.

The seam is the `forward` of single module instances: no class and no module of transformers is changed, so other
models in the process stay as they are.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ... import env
from ...backends.base import Request
from ...device import Device
from ...dispatch import Choice, resolve, wish

if TYPE_CHECKING:
    from .layer import KdaLayer

OLDEST, NEWEST = (5, 17), (6, 0)  # transformers versions, the newest excluded
LAYERS = {
    "transformers.models.glm5_next.modeling_glm5_next.Glm5NextTextLinearAttention": "glm5_next",
    "transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention": "kimi_linear",
}
# The parts of a KDA layer that its replacement uses.
PARTS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "conv1d",
    "b_proj",
    "g_a_proj",
    "g_b_proj",
    "o_norm",
    "o_proj",
    "layer_idx",
    "head_dim",
    "activation",
    "forget_gate.f_a_proj",
    "forget_gate.f_b_proj",
    "forget_gate.A_log",
    "forget_gate.dt_bias",
    "o_norm.weight",
    "o_norm.variance_epsilon",
    "o_norm.activation",
)
HOOKED = "_old_forward"  # where the accelerate library keeps the forward of a module that it hooks


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate` did.

    Attributes:
        family: "glm5_next" or "kimi_linear".
        layers: names of the modules that rapidkda now computes.
        prefill, decode: the backend of each, why it was taken and why each other one was passed over, on the first
            layer's device and dtype. A model that is moved afterwards gets the best backend of its new place.
    """

    family: str
    layers: tuple[str, ...]
    prefill: Choice
    decode: Choice

    def __str__(self) -> str:
        return f"{len(self.layers)} KDA layers of {self.family}; prefill: {self.prefill}; decode: {self.decode}"


def accelerate(model: nn.Module, backend: str | None = None, decode_backend: str | None = None) -> Acceleration:
    """Compute the KDA layers of a transformers model with rapidkda, in place, until `restore`.

    The model keeps its parameters, its cache and its interface: `generate`, prefill in chunks, several tokens on a
    filled cache, single-token decode, padded batches, beam search and training go on working. Calling it again
    changes the backends only.

    Args:
        model: a `glm5_next` or `kimi_linear` model of transformers 5.17 or newer, or any module that holds one.
        backend: prefill backend by name, or "auto"; None for `RAPIDKDA_PREFILL_BACKEND` and then "auto".
        decode_backend: likewise for single tokens, the convolution and the output norm, with
            `RAPIDKDA_DECODE_BACKEND`.

    Raises:
        TypeError: model is no torch module.
        ValueError: model has no KDA layers; a layer is one that rapidkda does not compute; an unknown backend name.
        RuntimeError: transformers is missing, too old or too new; or has changed the layer (names what it lacks).
        BackendUnavailable: a backend asked for by name cannot run here (lists every unmet requirement).
        Nothing is changed on an error.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _check_version()
    found = _kda_modules(model)
    if not found:
        raise ValueError(
            f"model must have KDA layers (the glm5_next and kimi_linear models of transformers), got "
            f"{type(model).__name__} without any"
        )
    prefill_name, prefill_source = wish(backend=backend, variable=env.PREFILL_BACKEND)
    decode_name, decode_source = wish(backend=decode_backend, variable=env.DECODE_BACKEND)
    choices: list[tuple[Choice, Choice]] = []
    for name, module in found:
        request = _request(name, module)
        for op in ("conv", "norm"):
            resolve(replace(request, op=op), decode_name, decode_source)
        decode = resolve(replace(request, op="decode"), decode_name, decode_source)
        choices.append((resolve(request, prefill_name, prefill_source), decode))
    _install(found, backend, decode_backend)
    prefill_choice, decode_choice = choices[0]
    return Acceleration(
        family=_family(found[0][1]) or "",
        layers=tuple(name for name, _ in found),
        prefill=prefill_choice,
        decode=decode_choice,
    )


def restore(model: nn.Module) -> int:
    """Undo `accelerate`, exactly. Returns how many layers were restored: 0 for a model that was not accelerated.

    Raises:
        TypeError: model is no torch module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    count = 0
    for module in model.modules():
        slot, layer = _installed(module)
        if layer is None:
            continue
        if layer.previous is not None:
            setattr(module, slot, layer.previous)
        elif slot == HOOKED:
            setattr(module, slot, type(module).forward.__get__(module))
        else:
            delattr(module, slot)
        count += 1
    return count


def _install(found: list[tuple[str, nn.Module]], backend: str | None, decode_backend: str | None) -> None:
    from .layer import KdaLayer  # loads torch's compiler, so only when it is needed

    for _, module in found:
        _, layer = _installed(module)
        if layer is not None:
            layer.prefill_backend, layer.decode_backend = backend, decode_backend
            continue
        slot = HOOKED if HOOKED in vars(module) else "forward"
        layer = KdaLayer(module, backend, decode_backend, vars(module).get(slot))
        setattr(module, slot, layer.forward)


def _installed(module: nn.Module) -> tuple[str, KdaLayer | None]:
    """Where a module's replacement sits, and the replacement (None without one)."""
    from .layer import KdaLayer  # loads torch's compiler, so only when it is needed

    for slot in ("forward", HOOKED):
        owner = getattr(vars(module).get(slot), "__self__", None)
        if isinstance(owner, KdaLayer):
            return slot, owner
    return "forward", None


def _check_version() -> None:
    expected = f"transformers >= {OLDEST[0]}.{OLDEST[1]} and < {NEWEST[0]}.{NEWEST[1]}"
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise RuntimeError(f"{expected} must be installed (pip install 'rapidkda[transformers]'): {error}") from error
    version = str(transformers.__version__)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) < NEWEST:
        raise RuntimeError(f"rapidkda works with {expected}, found {version}")


def _family(module: nn.Module) -> str | None:
    """The model family of a KDA layer, None for any other module. Subclasses count."""
    for cls in type(module).__mro__:
        family = LAYERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if family is not None:
            return family
    return None


def _kda_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if _family(module) is not None]


def _request(name: str, module: Any) -> Request:
    """What a layer is going to ask of a backend; raises where it is not the layer that we know."""
    missing = [part for part in PARTS if not _has(module, part)]
    if missing:
        version = importlib.import_module("transformers").__version__
        raise RuntimeError(
            f"layer {name} of transformers {version} is not the one that rapidkda knows from "
            f"{OLDEST[0]}.{OLDEST[1]}: it lacks {', '.join(missing)}"
        )
    if module.activation != "silu":
        raise ValueError(f"model must have KDA layers with activation 'silu', got {module.activation!r} in {name}")
    bound = getattr(module.forget_gate, "safe_gate_lower_bound", None)
    if bound is not None and not -5.0 <= bound < 0.0:
        raise ValueError(f"model must have a gate lower bound in [-5, 0) or none, got {bound} in {name}")
    weight: torch.Tensor = module.o_norm.weight
    return Request(
        op="prefill",
        device=Device.of(weight.device),
        dtype=weight.dtype,
        key_dim=module.head_dim,
        value_dim=module.head_dim,
        gate="softplus" if bound is None else "bounded",
    )


def _has(module: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True
