"""`rapidkda capture`: the operands of a model's KDA layers on real text, for bench and verify."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engine.loading import SHIPPED, load_model, load_text
from ..evaluation.capture import capture
from ..testing import captured
from .console import ModelOption, UserError, console, device_option, needs, readable, writable


def capture_operands(
    text: Annotated[Path, typer.Option(help="Text file that the model reads.")],
    out: Annotated[Path, typer.Option(help="File to write (safetensors).")],
    model: ModelOption = SHIPPED,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to keep.")] = 2048,
    skip: Annotated[int, typer.Option(min=0, help="Tokens that are read before them, for a state to start from.")] = 0,
    layer: Annotated[
        list[int] | None, typer.Option(help="Decoder layer; may be repeated. Default: all KDA layers.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:N]. Default: the GPU if there is one.")] = None,
) -> None:
    """Keep q, k, v, g and beta as the KDA operator sees them, with the gate's parameters and the state, in a file.

    `rapidkda bench prefill|decode|verify --inputs FILE` and `rapidkda verify --inputs FILE` take it. The model runs in
    float32 on the torch backend, and the operands are kept in bfloat16.

    **Example:** `rapidkda capture --text README.md --tokens 512 --out captured.safetensors`
    """
    place = device_option(device)
    target = writable(out, "--out")
    data = readable(text, "--text").read_bytes()
    needs("transformers", "transformers")
    quiet: Any = importlib.import_module("transformers").logging
    quiet.set_verbosity_error()  # it warns at every start that its own kernels are missing
    quiet.disable_progress_bar()
    try:
        loaded = load_model(model, dtype="float32", device=place)
        ids = load_text(model, loaded.config.get_text_config().vocab_size).encode(data)[: skip + tokens]
        if len(ids) < skip + tokens:
            raise ValueError(f"--text must hold {skip + tokens} tokens, got {len(ids)}")
        layers, bound = capture(loaded, ids, skip=skip, layers=layer)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    origin = {
        "model": model.name,
        "text": text.name,
        "text_sha256": hashlib.sha256(data).hexdigest(),
        "skip": skip,
        "tokens": tokens,
    }
    captured.save(target, layers, bound, origin)
    kept = ", ".join(map(str, layers))
    console().print(f"{tokens} tokens of {text.name} after {skip}; layers {kept}; {target.stat().st_size:,} bytes")
    typer.echo(f"wrote {target}", err=True)
