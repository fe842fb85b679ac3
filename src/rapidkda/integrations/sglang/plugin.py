"""The plugin: where SGLang's dispatcher of KDA kernels takes rapidkda's, and which SGLang.

Asked for by `--linear-attn-prefill-backend rapidkda`, a choice that the plugin adds. Without it SGLang runs its own
code, whatever its version; every other name passes unchanged.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from ..contract import Sources, differences
from ..post_import import after_import
from . import seam
from .kernel import RapidKdaKernel

NAME = "rapidkda"
FLAG = "--linear-attn-prefill-backend"
WRAPPED = "_rapidkda_wrapped"

log = logging.getLogger("sglang.rapidkda")


class UnsupportedSglang(RuntimeError):
    """The installed SGLang is not one that the plugin knows. Says what was expected and what was found."""


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`; SGLang calls it in every process, before it reads its arguments.

    A version without a registry of backends refuses the flag's value by itself. Any other is checked when a model with
    KDA layers is built and rapidkda was asked for; see `check`.
    """
    if importlib.util.find_spec(seam.CHOICES) is None:
        log.info("this SGLang has no registry of linear attention backends; rapidkda is not offered")
        return
    choices = importlib.import_module(seam.CHOICES)
    if NAME not in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        choices.add_linear_attn_kernel_backend_choices([NAME])
    after_import(seam.BACKEND, _wrap_dispatcher)


def check(installed: str, root: Path) -> None:
    """Raise `UnsupportedSglang` for a version, or sources under `root`, that the plugin does not know."""
    release = installed.split("+")[0]
    if release not in seam.SUPPORTED_VERSIONS:
        raise UnsupportedSglang(
            f"{FLAG} {NAME} supports SGLang {', '.join(seam.SUPPORTED_VERSIONS)}; found SGLang {installed}"
        )
    found = differences(seam.FACTS, Sources(root))
    if found:
        lines = "".join(f"\n  {difference}" for difference in found)
        raise UnsupportedSglang(f"SGLang {installed} at {root} differs from the one that {NAME} supports:{lines}")


def _asked() -> bool:
    utils = importlib.import_module(seam.UTILS)
    return bool(utils.get_exec().mamba.linear_attn_prefill_backend == NAME)


def _wrap_dispatcher(module: ModuleType) -> None:
    cls: Any = module.KDAKernelDispatcher
    build = cls.__init__
    if hasattr(build, WRAPPED):
        return

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _asked():
            build(self, *args, **kwargs)
            return
        check(version("sglang"), Path(inspect.getfile(module)).parents[5])
        given = inspect.signature(build).bind(self, *args, **kwargs).arguments
        asked_for = given["prefill_backend"]
        build(self, given["decode_backend"], type(asked_for).TRITON, given["verify_backend"])
        self.prefill_backend = asked_for
        self.extend_kernel = RapidKdaKernel(self.triton_kernel)
        log.info("rapidkda takes the prefill of KDA layers (%s %s)", FLAG, NAME)

    setattr(init, WRAPPED, True)
    cls.__init__ = init
