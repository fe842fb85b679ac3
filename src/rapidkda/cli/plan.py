"""`rapidkda plan`: which form of the CUDA prefill kernel serves a step, what the cost model predicts, and why."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ..backends.cuda.host.plan import CHUNK, plan_prefill
from ..testing.shapes import PREFILL
from .console import UserError, console

H200_MULTIPROCESSORS = 132


def plan(
    seq_lens: Annotated[
        str | None, typer.Option(help="Lengths of the step's sequences, in tokens, separated by commas.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Value heads on this GPU.")] = 16,
    multiprocessors: Annotated[int, typer.Option(min=1, help="Multiprocessors of the GPU.")] = H200_MULTIPROCESSORS,
) -> None:
    """Print the plan of the CUDA prefill for a step, or for every benchmark workload; needs no GPU.

    Example: `rapidkda plan --seq-lens 16384 --heads 16`
    """
    if seq_lens is None:
        steps = [(shape.name, shape.seq_lens, shape.heads) for shape in PREFILL]
    else:
        lengths = _lengths(seq_lens)
        steps = [("x".join(map(str, lengths)), lengths, heads)]
    table = Table(title=f"CUDA prefill on {multiprocessors} multiprocessors, predicted microseconds (bounded gate)")
    for column in ("step", "heads", "form", "parts", "launches", "predicted", "alternatives"):
        table.add_column(column, overflow="fold")
    for name, lengths, value_heads in steps:
        chunks = [-(-length // CHUNK) for length in lengths]
        chosen = plan_prefill(len(chunks), sum(chunks), max(chunks), value_heads, multiprocessors)
        others = ", ".join(f"{form} {us:.0f}" for form, us in chosen.alternatives)
        row = (name, value_heads, chosen.form, chosen.parts, chosen.launches, f"{chosen.predicted_us:.0f}", others)
        table.add_row(*map(str, row))
    console().print(table)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise UserError(f"--seq-lens must be positive numbers separated by commas, got {text!r}")
    return lengths
