"""rapidkda in the backend dispatch of flash-linear-attention.

fla asks its backends in order of priority whether they take a call, and logs once why each of them declines; with none
left it runs its own kernels. Version 0.6 dispatches both operators; 0.5 dispatches chunk_kda only, so the recurrent
forward is put behind the same dispatch while rapidkda is enabled.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ...dispatch import check_name
from . import calls

SUPPORTED_VERSIONS = ("0.5", "0.6")
RECURRENT = "fused_recurrent_kda_fwd"

# What a backend's operators may be called with; a name outside means that this fla is not the one known here.
CHUNK_PARAMETERS = {*calls.INPUTS, *calls.SHARED, *calls.CHUNK_ONLY, *calls.CHUNK_NEUTRAL, *calls.IGNORED}
RECURRENT_PARAMETERS = {*calls.INPUTS, *calls.GATE, *calls.SHARED, *calls.RECURRENT_NEUTRAL}
ALIASES = {"transpose_state_layout", "kwargs"}

log = logging.getLogger("rapidkda")


@dataclass
class _State:
    """Whether fla prefers rapidkda now, and what disable() puts back."""

    enabled: bool = False
    backend: str | None = None
    registered: set[str] = field(default_factory=set)
    restore: Callable[[], None] | None = None


_state = _State()


def enabled() -> bool:
    """Whether fla prefers rapidkda now."""
    return _state.enabled


def enable(backend: str | None = None) -> None:
    """Let chunk_kda and fused_recurrent_kda of fla run on rapidkda wherever it can, in inference.

    Calls that need gradients, context parallelism, graph mode or anything else that rapidkda does not do are declined
    with a reason, which fla logs once, and run as before.

    Args:
        backend: a rapidkda backend; None for the environment variables, else the fastest one that can run.

    Raises:
        RuntimeError: fla is of a version, or has a dispatch, that is not known here, or its dispatch is switched off.
        ModuleNotFoundError: fla is not installed.
    """
    if backend is not None:
        check_name(backend, "argument backend")
    fla = importlib.import_module("fla")
    version = str(fla.__version__)
    chunk = importlib.import_module("fla.ops.kda.chunk")
    recurrent = importlib.import_module("fla.ops.kda.fused_recurrent")
    _check_parameters(version, chunk.chunk_kda, CHUNK_PARAMETERS)
    _check_parameters(version, getattr(recurrent, RECURRENT), RECURRENT_PARAMETERS)
    if not _state.enabled:
        _register(version, chunk, recurrent)
    _state.enabled = True
    _state.backend = backend
    log.info("rapidkda is enabled in flash-linear-attention %s", version)


def disable() -> None:
    """Let fla choose as it did before `enable`."""
    if _state.restore is not None:
        _state.restore()
        _state.restore = None
    _state.enabled = False


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _check_parameters(version: str, function: Callable[..., Any], known: set[str]) -> None:
    name = function.__name__
    found = inspect.signature(inspect.unwrap(function)).parameters
    unknown = [parameter for parameter in found if parameter not in known | ALIASES]
    missing = [parameter for parameter in calls.INPUTS if parameter not in found]
    if _series(version) not in SUPPORTED_VERSIONS or unknown or missing:
        raise RuntimeError(
            f"rapidkda supports flash-linear-attention {' and '.join(SUPPORTED_VERSIONS)}; found {version}, "
            f"whose {name} takes {', '.join(found)}"
        )


def _register(version: str, chunk: ModuleType, recurrent: ModuleType) -> None:
    """Add rapidkda's backend to fla's registries, where it stays, disabled, after `disable`."""
    dispatch = importlib.import_module("fla.backends" if _series(version) == "0.6" else "fla.ops.backends")
    if dispatch._DISPATCH_DISABLED:
        raise RuntimeError(
            "fla's backend dispatch is switched off (environment variable FLA_DISABLE_BACKEND_DISPATCH=1)"
        )
    original = getattr(recurrent, RECURRENT)
    if version not in _state.registered:
        backend = _backend(dispatch.BaseBackend, chunk.chunk_kda, original)
        if _series(version) == "0.6":
            dispatch.register(chunk.chunk_kda)(backend)
            dispatch.register("kda")(backend)
        else:
            importlib.import_module("fla.ops.kda.backends").kda_registry.register(backend())
        _state.registered.add(version)
    if _series(version) != "0.6":
        setattr(recurrent, RECURRENT, dispatch.dispatch("kda")(original))
        _state.restore = lambda: setattr(recurrent, RECURRENT, original)


def _backend(base: type, chunk_kda: Callable[..., Any], recurrent_forward: Callable[..., Any]) -> type:
    """rapidkda as a backend class of fla. Methods carry the names that fla looks up."""
    chunk_signature = inspect.signature(inspect.unwrap(chunk_kda))
    recurrent_signature = inspect.signature(inspect.unwrap(recurrent_forward))

    def chunk_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return calls.canonical(chunk_signature.bind(*args, **kwargs).arguments)

    def recurrent_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = recurrent_signature.bind(*args, **kwargs)
        bound.apply_defaults()  # its final state is in place unless told otherwise
        return calls.canonical(bound.arguments)

    class RapidKdaBackend(base):  # type: ignore[misc]
        backend_type = "rapidkda"
        priority = -1  # before every backend of fla's own

        @classmethod
        def is_available(cls) -> bool:
            return True

        @classmethod
        def is_enabled(cls) -> bool:
            return _state.enabled

        def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            reason = calls.decline_chunk(chunk_call(args, kwargs), _state.backend)
            return reason is None, reason

        def chunk_kda(self, *args: Any, **kwargs: Any) -> Any:
            return calls.chunk(chunk_call(args, kwargs), _state.backend)

        def fused_recurrent_kda_fwd_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            reason = calls.decline_recurrent(recurrent_call(args, kwargs), _state.backend)
            return reason is None, reason

        def fused_recurrent_kda_fwd(self, *args: Any, **kwargs: Any) -> Any:
            return calls.recurrent(recurrent_call(args, kwargs), _state.backend)

    return RapidKdaBackend
