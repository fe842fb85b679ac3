"""The plugin: which vLLM, whether rapidkda is asked for, and the methods that it wraps.

Asked for by RAPIDKDA_VLLM=prefill or additional_config {"kda_prefill_backend": "rapidkda"}. Without either, vLLM runs
its own code; every other backend name passes to vLLM's resolver unchanged.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ... import env
from ...dispatch import CONFIG_KEY
from ...errors import ConfigConflict
from ...problem import CHECKPOINT_ALIGNMENT
from . import layers
from . import metadata as steps
from .contract import Sources, differences
from .post_import import after_import
from .seams import SEAMS, BuilderSeam, LayerSeam, RefusedLayer, Seam

NAME = "rapidkda"
PLAN = "_rapidkda_plan"
WRAPPED = "_rapidkda_wrapped"
CONFIG_SOURCE = f'additional_config["{CONFIG_KEY}"]'

# Below vLLM's own logger, so that its handlers and levels apply.
log = logging.getLogger("vllm.plugins.rapidkda")


class UnsupportedVllm(RuntimeError):
    """The installed vLLM is not one that the plugin knows. Says what was expected and what was found."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; vLLM calls it in every process, possibly more than once.

    Raises `UnsupportedVllm` if RAPIDKDA_VLLM=prefill is set and this vLLM has no seam, or one that differs. With the
    switch off, the same refusal comes when a configuration asks for rapidkda.
    """
    import vllm

    root = Path(inspect.getfile(vllm)).parent.parent
    try:
        seam = find_seam(vllm.__version__, root)
    except UnsupportedVllm as refusal:
        if env.vllm_prefill():
            raise
        log.debug("%s", refusal)
        _guard_configurations(str(refusal))
        return
    _guard_configurations(None)
    install(seam)
    if env.vllm_prefill():
        log.info("rapidkda takes the prefill of KDA layers (environment variable %s)", env.VLLM_SWITCH)


def find_seam(version: str, root: Path) -> Seam:
    """The seam of a vLLM version whose sources lie under `root`, checked fact by fact."""
    seam = SEAMS.get(version.split("+")[0])
    supported = ", ".join(SEAMS)
    if seam is None:
        raise UnsupportedVllm(f"rapidkda's prefill supports vLLM {supported}; found vLLM {version}")
    found = differences(seam.facts, Sources(root))
    if found:
        lines = "".join(f"\n  {difference}" for difference in found)
        raise UnsupportedVllm(f"vLLM {version} at {root} differs from the one that rapidkda supports:{lines}")
    return seam


def asked(vllm_config: Any) -> str | None:
    """Which source asks for rapidkda's prefill, or None.

    Raises `ConfigConflict` when RAPIDKDA_VLLM asks for it and the configuration names another backend.
    """
    configured = None
    if isinstance(vllm_config.additional_config, Mapping):
        configured = vllm_config.additional_config.get(CONFIG_KEY)
    switch = f"environment variable {env.VLLM_SWITCH}"
    if configured == NAME:
        return CONFIG_SOURCE
    if not env.vllm_prefill():
        return None
    if configured not in (None, "auto"):
        raise ConfigConflict(
            f"conflicting backends: {switch} asks for {NAME!r}, {CONFIG_SOURCE} asks for {configured!r}; "
            "set one of them, or the same in both"
        )
    return switch


def _guard_configurations(refusal: str | None) -> None:
    """Check every VllmConfig when it is made: conflicting wishes, or a wish that this vLLM cannot have."""
    from vllm.config import VllmConfig

    original = VllmConfig.__post_init__
    if hasattr(original, WRAPPED):
        return

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        source = asked(self)
        if source is not None and refusal is not None:
            raise UnsupportedVllm(f"{source} asks for {NAME!r}, but {refusal}")
        original(self, *args, **kwargs)

    _replace(VllmConfig, "__post_init__", post_init)


def install(seam: Seam) -> None:
    """Wrap the classes of a seam, now or when vLLM imports them. Idempotent."""
    for layer in seam.layers:
        after_import(layer.module, functools.partial(_wrap_layer, layer))
    for builder in seam.builders:
        after_import(builder.module, functools.partial(_wrap_builder, builder))
    for refused in seam.refused:
        after_import(refused.module, functools.partial(_wrap_refused, refused))


def _replace(cls: type, name: str, function: Callable[..., Any]) -> None:
    setattr(function, WRAPPED, True)
    setattr(cls, name, function)


def _wrap_layer(seam: LayerSeam, module: ModuleType) -> None:
    cls = getattr(module, seam.cls)
    if hasattr(cls.__init__, WRAPPED):
        return
    build, forward = cls.__init__, cls._forward
    signature = inspect.signature(build)

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config = signature.bind(self, *args, **kwargs).arguments["vllm_config"]
        source = asked(vllm_config)
        if source is None:
            build(self, *args, **kwargs)
            return
        with _triton_configured(vllm_config, seam):
            build(self, *args, **kwargs)
        plan = layers.plan(seam, self, vllm_config)
        if seam.resolver:
            self.kda_prefill_backend = NAME
        setattr(self, PLAN, plan)
        _log_once(seam, source, str(plan))

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

    if seam.eager_break:
        from vllm.compilation.breakable_cudagraph import eager_break_during_capture

        step = eager_break_during_capture(step)
    _replace(cls, "__init__", init)
    _replace(cls, "_forward", step)
    if seam.checkpoints:
        _wrap_cache_spec(cls)


def _wrap_cache_spec(cls: type) -> None:
    """Ask for a checkpoint block where rapidkda runs the prefill, as vLLM's own fused prefill does."""
    original = cls.get_kv_cache_spec  # type: ignore[attr-defined]

    @functools.wraps(original)
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        if getattr(self, PLAN, None) is None:
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=CHECKPOINT_ALIGNMENT)

    _replace(cls, "get_kv_cache_spec", get_kv_cache_spec)


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
        if made.num_prefills and _taken:
            host = steps.host_lengths(made, common_attn_metadata.query_start_loc_cpu, num_decode_draft_tokens_cpu)
            setattr(made, steps.HOST, host)
        return made

    _replace(cls, "build", build)
    if seam.update:
        derive = cls.update_block_table

        @functools.wraps(derive)
        def update_block_table(self: Any, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
            made = derive(self, metadata, blk_table, slot_mapping)
            if hasattr(metadata, steps.HOST):
                setattr(made, steps.HOST, getattr(metadata, steps.HOST))
            return made

        _replace(cls, "update_block_table", update_block_table)


def _wrap_refused(seam: RefusedLayer, module: ModuleType) -> None:
    cls = getattr(module, seam.cls)
    build = cls.__init__
    if hasattr(build, WRAPPED):
        return
    signature = inspect.signature(build)

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        source = asked(signature.bind(self, *args, **kwargs).arguments["vllm_config"])
        if source is not None:
            raise UnsupportedVllm(
                f"{source} asks for {NAME!r}, but {seam.module}.{seam.cls} is not served: {seam.reason}"
            )
        build(self, *args, **kwargs)

    _replace(cls, "__init__", init)


def _metadata(module: ModuleType, prefix: str) -> Any:
    """The layer's metadata of this step; None in runs without (profiling, warm-up)."""
    found = module.get_forward_context().attn_metadata
    return found.get(prefix) if isinstance(found, dict) else None


@contextmanager
def _triton_configured(vllm_config: Any, seam: LayerSeam) -> Iterator[None]:
    """Let a layer's own resolver see the name of its portable prefill, while the layer is built."""
    configured = vllm_config.additional_config
    if seam.resolver:
        vllm_config.additional_config = {
            **(configured if isinstance(configured, Mapping) else {}),
            CONFIG_KEY: "triton",
        }
    try:
        yield
    finally:
        vllm_config.additional_config = configured


_taken: set[tuple[str, str]] = set()  # (layer class, plan) of the layers that rapidkda serves


def _log_once(seam: LayerSeam, source: str, plan: str) -> None:
    """One line for each layer class and plan."""
    taken = (f"{seam.module}.{seam.cls}", plan)
    if taken not in _taken:
        _taken.add(taken)
        log.info("%s (%s): %s; asked for by %s", seam.cls, seam.model, plan, source)
