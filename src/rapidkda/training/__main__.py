"""`python -m rapidkda.training`: build the corpus, train, export the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from .batches import KINDS, MIXTURE, Mixture
from .loop import Settings, Stage, train

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.command("corpus")
def corpus_command(
    out: Annotated[Path, typer.Option(help="File to write.")],
    downloads: Annotated[Path, typer.Option(help="Folder of the packages; missing ones are fetched.")],
) -> None:
    """Fetch, check and clean the training text."""
    from .corpus import build

    for title, size in build(out, downloads).items():
        typer.echo(f"{size:>12,} {title}")


@app.command("train")
def train_command(
    corpus: Annotated[Path, typer.Option(help="Training text, of the command corpus.")],
    out: Annotated[Path, typer.Option(help="Folder of the log and the checkpoint.")],
    minutes: Annotated[float, typer.Option(help="Wall time, checkpoint included.")],
    resume: Annotated[Path | None, typer.Option(help="Folder of a checkpoint to continue.")] = None,
    stages: Annotated[str, typer.Option(help="Row lengths over time as length:until, until from 0 to 1.")] = (
        "512:0.3,4096:1"
    ),
    mixture: Annotated[Mixture, typer.Option(help=f"Shares of the tokens: {', '.join(KINDS)}.")] = MIXTURE,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 65_536,
    rates: Annotated[tuple[float, float], typer.Option(help="Learning rate factors, first and last.")] = (1.0, 0.05),
    constant: Annotated[float, typer.Option(help="Share of the time before the rates fall.")] = 0.6,
    seed: Annotated[int, typer.Option(help="Of data and weights; continue with another one.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that make batches.")] = 6,
    compiled: Annotated[bool, typer.Option(help="Use torch.compile.")] = True,
    kda: Annotated[str | None, typer.Option(help="Source of KDA's gradients; by default the first that works.")] = None,
    probe_seconds: Annotated[float, typer.Option(help="Between measurements.")] = 30.0,
    most_steps: Annotated[int | None, typer.Option(help="Stop early after so many steps.")] = None,
    device: Annotated[str, typer.Option(help="Where to train.")] = "cuda",
) -> None:
    """Train for a number of minutes; always ends with a checkpoint."""
    found = train(
        Settings(
            corpus=corpus,
            out=out,
            minutes=minutes,
            resume=resume,
            stages=[
                Stage(int(length), float(until)) for length, until in (one.split(":") for one in stages.split(","))
            ],
            mixture=mixture,
            batch_tokens=batch_tokens,
            rates=rates,
            constant=constant,
            seed=seed,
            workers=workers,
            compiled=compiled,
            kda=kda,
            probe_seconds=probe_seconds,
            most_steps=most_steps,
            device=torch.device(device),
        )
    )
    for name, value in found.items():
        typer.echo(f"{name:>24} {value:.4f}")


@app.command("export")
def export_command(
    checkpoint: Annotated[Path, typer.Option(help="Folder of the checkpoint.")],
    log: Annotated[list[Path], typer.Option(help="log.jsonl of each run that led to it, in order.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Write the model that ships, with its card."""
    from .export import export

    export(checkpoint, log, out)


if __name__ == "__main__":
    app()
