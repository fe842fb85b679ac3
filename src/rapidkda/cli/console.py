"""What the commands share: the console, and the error that a user can mend."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from .. import env
from ..dispatch import AUTO, check_name
from ..testing import captured
from ..testing.captured import Captured

WIDTH_WHEN_PIPED = 132  # tables must not be cut to 80 columns in a log

ModelOption = Annotated[
    Path,
    typer.Option(
        help="Folder of a glm5_next or kimi_linear model (Hugging Face files).",
        show_default="the small model of this package",
    ),
]


class UserError(Exception):
    """The user must change something; the message says what, in one line."""


def _known_backend(variable: str) -> None:
    value = env.backend_name(variable)
    if value is not None:
        check_name(value, f"environment variable {variable}")


VARIABLES: dict[str, Callable[[], object]] = {
    "RAPIDKDA_CHECK": env.check_device_values,
    "RAPIDKDA_CACHE_DIR": env.cache_dir,
    "RAPIDKDA_RACECHECK": env.racecheck,
    "RAPIDKDA_REVISION": env.revision,
    env.VLLM_SWITCH: env.vllm_prefill,
    env.PREFILL_BACKEND: partial(_known_backend, env.PREFILL_BACKEND),
    env.DECODE_BACKEND: partial(_known_backend, env.DECODE_BACKEND),
}


def complaint(variable: str) -> str | None:
    """What is wrong with the value of an environment variable; None if nothing is."""
    if variable not in VARIABLES:
        return "rapidkda reads no such variable"
    try:
        VARIABLES[variable]()
    except ValueError as error:
        return str(error)
    return None


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH_WHEN_PIPED)


def backend_option(value: str) -> str:
    """A known backend name, or a UserError."""
    try:
        return check_name(value, "--backend")
    except ValueError as error:
        raise UserError(str(error)) from None


def one_backend(value: str | None) -> str | None:
    """A known backend other than `auto`, None for all of them."""
    if value is None:
        return None
    name = backend_option(value)
    return None if name == AUTO else name


def device_option(wanted: str | None) -> torch.device:
    """The device of `--device`; a GPU if there is one without it. UserError for one that is not here."""
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UserError(f"--device must be cpu or cuda[:N], got {wanted!r}") from None
    if device.type not in ("cpu", "cuda") or (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise UserError(f"--device must be cpu or one of {torch.cuda.device_count()} cuda devices, got {wanted!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {wanted} needs a GPU that torch can use; see rapidkda doctor")
    return device


def readable(path: Path, what: str) -> Path:
    """A file that exists, or a UserError."""
    if not path.is_file():
        raise UserError(f"{what} must be an existing file, got {path}")
    return path


def writable(path: Path, what: str) -> Path:
    """A path in an existing or new folder, or a UserError."""
    if path.is_dir():
        raise UserError(f"{what} must be a file, got the folder {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{what} must be in a folder that can be made, got {path}: {error.strerror}") from None
    return path


def captured_option(path: Path) -> Captured:
    """The captured operands of `--inputs`, or a UserError."""
    try:
        return captured.load(readable(path, "--inputs"))
    except ValueError as error:
        raise UserError(f"--inputs: {error}") from None


def load_flashkda(path: Path) -> None:
    """FlashKDA's operator library from a file, or a UserError."""
    try:
        torch.ops.load_library(str(readable(path, "--flashkda")))
    except OSError as error:
        raise UserError(f"--flashkda must be a library that can be loaded, got {path}: {error}") from None


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def needs(module: str, extra: str) -> None:
    """A UserError that names the extra when a module is missing."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{module} is not installed; run: pip install 'rapidkda[{extra}]'")
