"""The plugin: which vLLM, whether rapidkda is asked for, and where it refuses.

Asked for by RAPIDKDA_VLLM=prefill or additional_config {"kda_prefill_backend": "rapidkda"}. Without either, vLLM runs
its own code; every other backend name passes to vLLM's resolver unchanged.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import env
from ...dispatch import CONFIG_KEY
from ...errors import ConfigConflict
from ..contract import Sources, differences
from . import wrap
from .seams import SEAMS, Seam

CONFIG_SOURCE = f'additional_config["{CONFIG_KEY}"]'

# Below vLLM's own logger, so that its handlers and levels apply.
log = logging.getLogger("vllm.plugins.rapidkda")


class UnsupportedVllm(RuntimeError):
    """The installed vLLM is not one that the plugin knows. Says what was expected and what was found."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; vLLM calls it in every process, possibly more than once.

    Raises `UnsupportedVllm` if RAPIDKDA_VLLM=prefill is set and this vLLM has no seam, or one that differs. With the
    switch off, nothing is checked until a configuration asks for rapidkda; then the same refusal comes there.
    """
    import vllm

    version, root = str(vllm.__version__), Path(inspect.getfile(vllm)).parent.parent
    check = functools.cache(lambda: find_seam(version, root))
    if env.vllm_prefill():
        check()
        log.info("rapidkda takes the prefill of KDA layers (environment variable %s)", env.VLLM_SWITCH)

    def wish(vllm_config: Any) -> str | None:
        source = asked(vllm_config)
        if source is not None:
            try:
                check()
            except UnsupportedVllm as refusal:
                raise UnsupportedVllm(f"{source} asks for {wrap.NAME!r}, but {refusal}") from None
        return source

    _guard_configurations(wish)
    seam = SEAMS.get(_release(version))
    if seam is not None:
        wrap.install(seam, wish)


def find_seam(version: str, root: Path) -> Seam:
    """The seam of a vLLM version whose sources lie under `root`, checked fact by fact."""
    seam = SEAMS.get(_release(version))
    if seam is None:
        raise UnsupportedVllm(f"rapidkda's prefill supports vLLM {', '.join(SEAMS)}; found vLLM {version}")
    found = differences(seam.facts, Sources(root))
    if found:
        lines = "".join(f"\n  {difference}" for difference in found)
        raise UnsupportedVllm(f"vLLM {version} at {root} differs from the one that rapidkda supports:{lines}")
    return seam


def _release(version: str) -> str:
    """Builds of one release differ in their local part only: 0.33.0+cu130 is 0.33.0."""
    return version.split("+")[0]


def asked(vllm_config: Any) -> str | None:
    """Which source asks for rapidkda's prefill, or None.

    Raises `ConfigConflict` when RAPIDKDA_VLLM asks for it and the configuration names another backend.
    """
    configured = None
    if isinstance(vllm_config.additional_config, Mapping):
        configured = vllm_config.additional_config.get(CONFIG_KEY)
    switch = f"environment variable {env.VLLM_SWITCH}"
    if configured == wrap.NAME:
        return CONFIG_SOURCE
    if not env.vllm_prefill():
        return None
    if configured not in (None, "auto"):
        raise ConfigConflict(
            f"conflicting backends: {switch} asks for {wrap.NAME!r}, {CONFIG_SOURCE} asks for {configured!r}; "
            "set one of them, or the same in both"
        )
    return switch


def _guard_configurations(wish: wrap.Wish) -> None:
    """Look at every VllmConfig when it is made: conflicting wishes, or a wish that this vLLM cannot have, end there."""
    from vllm.config import VllmConfig

    original = VllmConfig.__post_init__
    if hasattr(original, wrap.WRAPPED):
        return

    @functools.wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        wish(self)
        original(self, *args, **kwargs)

    wrap.replace_method(VllmConfig, "__post_init__", post_init)
