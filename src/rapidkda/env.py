"""Every environment variable that rapidkda reads, typed. A value that cannot be parsed raises."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def _read(name: str) -> str | None:
    """`os.environ.get`, which takes a microsecond for a variable that is not set: it raises and catches twice."""
    try:
        if _encoded(name) not in os.environ._data:  # type: ignore[attr-defined]
            return None
    except AttributeError:  # another implementation of Python, or a plain mapping in its place
        pass
    return os.environ.get(name)


@functools.cache
def _encoded(name: str) -> Any:
    """The form in which the environment keeps a name."""
    return os.environ.encodekey(name)


def flag(name: str, default: bool = False) -> bool:
    """Read a boolean variable: 1/true/yes/on or 0/false/no/off (any case)."""
    raw = _read(name)
    if raw is None:
        return default
    value = raw.strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"environment variable {name} must be one of 1, 0, true, false, yes, no, on, off; got {raw!r}")


def check_device_values() -> bool:
    """RAPIDKDA_CHECK: also check values that live on a device (costs a device-to-host copy a call)."""
    return flag("RAPIDKDA_CHECK")


def racecheck() -> bool:
    """RAPIDKDA_RACECHECK: kernels whose barriers compute-sanitizer's racecheck can follow; slower, same results."""
    return flag("RAPIDKDA_RACECHECK")


def revision() -> str | None:
    """RAPIDKDA_REVISION: revision of the sources for result files, where git cannot tell it."""
    return os.environ.get("RAPIDKDA_REVISION") or None


PREFILL_BACKEND = "RAPIDKDA_PREFILL_BACKEND"
DECODE_BACKEND = "RAPIDKDA_DECODE_BACKEND"


def backend_name(variable: str) -> str | None:
    """The backend that an environment variable asks for, or None. Names are validated by the resolver."""
    raw = _read(variable)
    return raw.strip() if raw is not None and raw.strip() else None


VLLM_SWITCH = "RAPIDKDA_VLLM"


def vllm_prefill() -> bool:
    """RAPIDKDA_VLLM: `prefill` runs the prefill of vLLM's KDA layers on rapidkda; unset, empty or `off` does not."""
    raw = os.environ.get(VLLM_SWITCH, "").strip().lower()
    if raw not in ("", "off", "prefill"):
        raise ValueError(f"environment variable {VLLM_SWITCH} must be prefill, off or unset; got {raw!r}")
    return raw == "prefill"


def cache_dir() -> Path:
    """RAPIDKDA_CACHE_DIR: where compiled kernels are kept (default: ~/.cache/rapidkda)."""
    raw = os.environ.get("RAPIDKDA_CACHE_DIR")
    if raw:
        return Path(raw).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rapidkda"
