"""`rapidkda compile`: fill the cache of compiled kernels ahead of time. Needs no GPU."""

from __future__ import annotations

import importlib.util
import time
from typing import Annotated

import typer

from .. import env
from ..errors import CompilationError
from .console import UserError

ARCHS = ("sm_90a",)


def compile_kernels(
    arch: Annotated[str, typer.Option(help=f"Architecture: {', '.join(ARCHS)}.")] = ARCHS[0],
) -> None:
    """Compile the kernels of the cuda backend into the cache, so that no serving process waits for the compiler.

    **Example:** `rapidkda compile --arch sm_90a`
    """
    if arch not in ARCHS:
        raise UserError(f"--arch must be one of {', '.join(ARCHS)}, got {arch!r}")
    if importlib.util.find_spec("cuda") is None:
        raise UserError("the compiler is not installed; run: pip install 'rapidkda[cuda]'")
    from ..backends.cuda import compile_all

    start = time.perf_counter()
    try:
        count = compile_all(arch)
    except CompilationError as error:
        typer.echo(f"rapidkda: {error}", err=True)
        raise typer.Exit(1) from None
    seconds = time.perf_counter() - start
    typer.echo(f"{count} kernels compiled for {arch} in {seconds:.1f} s, the rest was there; cache: {env.cache_dir()}")
