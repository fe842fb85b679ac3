"""Models whose layers live on several devices, or are loaded when their turn comes."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from rapidkda.integrations.transformers import accelerate, restore

from .support import BAR, BUILDERS, error, in_chunks, kda_layer, run, tokens

pytest.importorskip("transformers", minversion="5.17")


class Hook:
    """What the accelerate library attaches to modules whose weights live elsewhere."""

    def __init__(self) -> None:
        self.loaded = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.loaded += 1
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output


def attach(module: Any, hook: Hook) -> None:
    module._hf_hook, module._old_forward = hook, module.forward

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._hf_hook.pre_forward(self, *args, **kwargs)
        return self._hf_hook.post_forward(self, self._old_forward(*args, **kwargs))

    module.forward = MethodType(hooked, module)


@pytest.mark.parametrize("hooks_first", [True, False])
def test_offloading_hooks_still_fire(family: str, hooks_first: bool) -> None:
    model = BUILDERS[family]()
    ids = tokens(1, 20)
    want, _ = run(model, ids)
    layer = kda_layer(model)
    hooks = {name: Hook() for name in ("", "conv1d", "forget_gate", "o_norm", "q_proj")}
    if not hooks_first:
        accelerate(model)
    for name, hook in hooks.items():
        attach(layer.get_submodule(name), hook)
    if hooks_first:
        accelerate(model)
    got, _ = run(model, ids)
    assert error(got, want) < BAR
    assert not torch.equal(got, want)
    assert {name: hook.loaded for name, hook in hooks.items()} == dict.fromkeys(hooks, 1)
    assert restore(model) == 3
    assert torch.equal(run(model, ids)[0], want)
    assert {name: hook.loaded for name, hook in hooks.items()} == dict.fromkeys(hooks, 2)


def device_map(model: Any, devices: list[str | int]) -> dict[str, str | int]:
    """Decoder layers on the devices in turn, everything else on the first."""
    layers = next(
        m for m in model.modules() if isinstance(m, nn.ModuleList) and kda_layer(model) in list(m[0].children())
    )
    names = {module: name for name, module in model.named_modules()}
    found = {names[block]: devices[i % len(devices)] for i, block in enumerate(layers)}
    for name, _ in model.named_parameters():
        if not name.startswith(f"{names[layers]}."):
            found[name.rsplit(".", 1)[0]] = devices[0]
    return found


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(["cpu", "cpu"], id="cpu"),
        pytest.param([0, "cpu"], id="gpu and cpu", marks=pytest.mark.gpu),
        pytest.param([0, 1], id="two gpus", marks=[pytest.mark.gpu, TWO_GPUS]),
    ],
)
@pytest.mark.parametrize("accelerate_first", [False, True])
def test_device_map_splits(family: str, devices: list[str | int], accelerate_first: bool) -> None:
    """Layers on several devices, or loaded from the CPU when their turn comes, give what one device gives."""
    hooks = pytest.importorskip("accelerate", reason="the accelerate library splits models")
    model = BUILDERS[family]()
    ids = tokens(2, 21)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want, want_tokens = run(model, ids)[0], model.generate(ids, **options)
    if accelerate_first:
        accelerate(model)
    hooks.dispatch_model(model, device_map(model, devices), main_device=devices[0], force_hooks=True)
    if not accelerate_first:
        accelerate(model)
    ids = ids.to(devices[0])
    assert error(in_chunks(model, ids, [17, 3, 1])[0].cpu(), want) < BAR
    options["attention_mask"] = mask.to(devices[0])
    assert torch.equal(model.generate(ids, **options).cpu(), want_tokens)
    assert restore(model) == 3
    assert error(run(model, ids)[0].cpu(), want) < BAR
