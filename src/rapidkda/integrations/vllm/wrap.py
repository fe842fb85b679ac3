"""The methods of vLLM's classes that the plugin wraps, and when.

The constructor of each layer class is wrapped when vLLM imports its module. Everything else (the layer's step, its
cache specification, the metadata builders) is wrapped when the first layer that asks for rapidkda is built, so a
process that never asks runs vLLM's own methods.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

from ...dispatch import CONFIG_KEY
from ...problem import CHECKPOINT_ALIGNMENT
from ..post_import import after_import
from . import layers
from . import metadata as steps
from .seams import BuilderSeam, LayerSeam, RefusedLayer, Seam

NAME = "rapidkda"
PLAN = "_rapidkda_plan"
WRAPPED = "_rapidkda_wrapped"

# Which source of a VllmConfig asks for rapidkda, or None; raises when it cannot have it.
Wish = Callable[[Any], str | None]

log = logging.getLogger("vllm.plugins.rapidkda")


def install(seam: Seam, wish: Wish) -> None:
    """Wrap the constructors of a seam's layer classes, now or when vLLM imports them. Idempotent."""
    for layer in seam.layers:
        after_import(layer.module, functools.partial(_wrap_layer, seam, layer, wish))
    for refused in seam.refused:
        after_import(refused.module, functools.partial(_wrap_refused, refused, wish))


def replace_method(cls: type, name: str, function: Callable[..., Any]) -> None:
    """Put a wrapper in place of a method and mark it."""
    setattr(function, WRAPPED, True)
    setattr(cls, name, function)


def _constructor(module: ModuleType, name: str) -> tuple[type, Callable[..., None], inspect.Signature] | None:
    """A class with its constructor, unless it is wrapped already or not there.

    A class that is missing is named by the contract as soon as somebody asks for rapidkda.
    """
    cls = getattr(module, name, None)
    if cls is None or hasattr(cls.__init__, WRAPPED):
        return None
    return cls, cls.__init__, inspect.signature(cls.__init__)


def _wrap_layer(seam: Seam, layer: LayerSeam, wish: Wish, module: ModuleType) -> None:
    found = _constructor(module, layer.cls)
    if found is None:
        return
    cls, build, signature = found

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config = signature.bind(self, *args, **kwargs).arguments["vllm_config"]
        source = wish(vllm_config)
        if source is None:
            build(self, *args, **kwargs)
            return
        _take(seam, layer, cls, module)
        with _triton_configured(vllm_config, layer):
            build(self, *args, **kwargs)
        plan = layers.plan(layer, self, vllm_config)
        if layer.resolver:
            self.kda_prefill_backend = NAME
        setattr(self, PLAN, plan)
        _log_once(layer, source, str(plan))

    replace_method(cls, "__init__", init)


def _take(seam: Seam, layer: LayerSeam, cls: type, module: ModuleType) -> None:
    """Wrap what a layer class needs for its prefill steps. Idempotent."""
    _wrap_step(layer, cls, module)
    if layer.checkpoints:
        _wrap_cache_spec(cls)
    for builder in seam.builders:
        after_import(builder.module, functools.partial(_wrap_builder, builder))


def _wrap_step(layer: LayerSeam, cls: Any, module: ModuleType) -> None:
    if hasattr(cls._forward, WRAPPED):
        return
    forward = cls._forward

    @functools.wraps(forward)
    def step(self: Any, **arguments: Any) -> None:
        plan: layers.Plan | None = getattr(self, PLAN, None)
        if plan is None:
            forward(self, **arguments)
            return
        found = _metadata(module, self.prefix)
        if found is None:
            plan.workspace()  # vLLM measures memory in runs without metadata: the scratch must exist by then
            forward(self, **arguments)
        elif found.num_prefills == 0:
            forward(self, **arguments)
        else:
            layers.run(plan, self, found, arguments)

    if layer.eager_break:
        from vllm.compilation.breakable_cudagraph import eager_break_during_capture

        step = eager_break_during_capture(step)
    replace_method(cls, "_forward", step)


def _wrap_cache_spec(cls: Any) -> None:
    """Ask for a checkpoint block where rapidkda runs the prefill, as vLLM's own fused prefill does."""
    if hasattr(cls.get_kv_cache_spec, WRAPPED):
        return
    original = cls.get_kv_cache_spec

    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        if getattr(self, PLAN, None) is None:
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=CHECKPOINT_ALIGNMENT)

    replace_method(cls, "get_kv_cache_spec", get_kv_cache_spec)


def _wrap_builder(seam: BuilderSeam, module: ModuleType) -> None:
    """Keep the host's lengths beside the metadata of steps with a prefill."""
    cls = getattr(module, seam.cls)
    if hasattr(cls.build, WRAPPED):
        return
    original = cls.build

    @functools.wraps(original)
    def build(
        self: Any,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Any = None,
        fast_build: bool = False,
    ) -> Any:
        made = original(
            self, common_prefix_len, common_attn_metadata, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build
        )
        if made.num_prefills:
            host = steps.host_lengths(made, common_attn_metadata.query_start_loc_cpu, num_decode_draft_tokens_cpu)
            setattr(made, steps.HOST, host)
        return made

    replace_method(cls, "build", build)
    if seam.update:
        derive = cls.update_block_table

        @functools.wraps(derive)
        def update_block_table(self: Any, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
            made = derive(self, metadata, blk_table, slot_mapping)
            if hasattr(metadata, steps.HOST):
                setattr(made, steps.HOST, getattr(metadata, steps.HOST))
            return made

        replace_method(cls, "update_block_table", update_block_table)


def _wrap_refused(refused: RefusedLayer, wish: Wish, module: ModuleType) -> None:
    found = _constructor(module, refused.cls)
    if found is None:
        return
    cls, build, signature = found

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        source = wish(signature.bind(self, *args, **kwargs).arguments["vllm_config"])
        if source is not None:
            where = f"{refused.module}.{refused.cls}"
            raise RuntimeError(f"{source} asks for {NAME!r}, but {where} is not served: {refused.reason}")
        build(self, *args, **kwargs)

    replace_method(cls, "__init__", init)


def _metadata(module: ModuleType, prefix: str) -> Any:
    """The layer's metadata of this step; None in runs without (profiling, warm-up)."""
    found = module.get_forward_context().attn_metadata
    return found.get(prefix) if isinstance(found, dict) else None


@contextmanager
def _triton_configured(vllm_config: Any, layer: LayerSeam) -> Iterator[None]:
    """Let a layer's own resolver see the name of its portable prefill, while the layer is built."""
    configured = vllm_config.additional_config
    if layer.resolver:
        vllm_config.additional_config = {
            **(configured if isinstance(configured, Mapping) else {}),
            CONFIG_KEY: "triton",
        }
    try:
        yield
    finally:
        vllm_config.additional_config = configured


_taken: set[tuple[str, str]] = set()  # (layer class, plan) of the layers that rapidkda serves


def _log_once(layer: LayerSeam, source: str, plan: str) -> None:
    """One line for each layer class and plan."""
    taken = (f"{layer.module}.{layer.cls}", plan)
    if taken not in _taken:
        _taken.add(taken)
        log.info("%s (%s): %s; asked for by %s", layer.cls, layer.model, plan, source)
