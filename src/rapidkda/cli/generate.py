"""`rapidkda generate`: continue a text with the embedded engine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..dispatch import check_name
from ..engine import Engine, EngineConfig, MtpHead, RequestResult, SamplingParams
from ..engine.loading import HEAD_FILE, SHIPPED, Text, load_model, load_text
from ..serving import BackendWish
from .console import WIDTH_WHEN_PIPED, ModelOption, UserError, device_option, needs, readable

Rollback = Literal["replay", "slots"]


def generate(
    prompt_file: Annotated[Path, typer.Option(help="Text file to continue.")],
    model: ModelOption = SHIPPED,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    speculate: Annotated[int, typer.Option(min=0, help="Draft tokens a step; 0 for none.")] = 0,
    mtp: Annotated[
        Path | None,
        typer.Option(
            help="Weights of an MTP head to draft with.",
            show_default=f"the model folder's {HEAD_FILE}; without one, drafts come from prompt lookup",
        ),
    ] = None,
    rollback: Annotated[Rollback, typer.Option(help="How rejected drafts are undone.")] = "replay",
    record_rows: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Records of a request with replay. Without drafts: states are stored only when they are full.",
            show_default="none without drafts, else those of two steps and at least 8",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the k most likely tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens of this probability.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the draws; by default a new one, which is told.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of one prefill chunk.")] = 2048,
    backend: Annotated[str | None, typer.Option(help="Prefill backend, or auto.")] = None,
    decode_backend: Annotated[str | None, typer.Option(help="Decode and verify backend, or auto.")] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the weights; auto as in the files.")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:N]. Default: the GPU if there is one.")] = None,
) -> None:
    """Continue a text with a model of the KDA families, and say how fast it was and which backends ran.

    Without a tokenizer in the model's folder, the bytes of the file are the tokens. The text goes to the standard
    output; progress and summary go to the standard error.

    **Example:** `rapidkda generate --prompt-file prompt.txt --max-new-tokens 64 --speculate 3`
    """
    place = device_option(device)
    data = readable(prompt_file, "--prompt-file").read_bytes()
    if not data:
        raise UserError(f"--prompt-file must not be empty, got {prompt_file}")
    needs("transformers", "transformers")
    quiet: Any = importlib.import_module("transformers").logging
    quiet.set_verbosity_error()  # it warns at every start that its own kernels are missing
    quiet.disable_progress_bar()
    out = _progress_console()
    try:
        backends = BackendWish(
            prefill=None if backend is None else check_name(backend, "--backend"),
            decode=None if decode_backend is None else check_name(decode_backend, "--decode-backend"),
        )
        loaded = load_model(model, dtype=dtype if dtype == "auto" else getattr(torch, dtype), device=place)
        config = EngineConfig(
            max_num_batched_tokens=1 + max(chunk, speculate),
            max_num_seqs=1,
            prefill_chunk=chunk,
            max_drafts=speculate,
            rollback=rollback,
            record_rows=record_rows,
            backends=backends,
        )
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_ids=_stop_ids(loaded),
        )
        if mtp is None and (model / HEAD_FILE).is_file():
            mtp = model / HEAD_FILE
        engine = Engine(loaded, config, "lookup" if mtp is None else _head(mtp, loaded, config))
        text = load_text(model, engine.model.vocab_size)
        result = _run(engine, text, text.encode(data), params, out)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    _summarise(out, engine, text, params, result)
    if result.error is not None:
        raise typer.Exit(1)


def _progress_console() -> Console:
    """On the standard error, so that the text can be piped on."""
    found = Console(highlight=False, stderr=True)
    return found if found.is_terminal else Console(highlight=False, stderr=True, width=WIDTH_WHEN_PIPED)


def _stop_ids(model: Any) -> tuple[int, ...]:
    """End tokens of the model's generation settings."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        return ()
    return tuple(ends) if isinstance(ends, list) else (ends,)


def _head(path: Path, model: Any, config: EngineConfig) -> MtpHead:
    weight = model.lm_head.weight
    text_config = model.config.get_text_config()
    head = MtpHead.from_config(
        text_config,
        dtype=weight.dtype,
        state_dtype=config.state_dtype,
        backends=config.backends,
        device=weight.device,
    )
    head.load_weights(path)
    return head


def _run(engine: Engine, text: Text, prompt: list[int], params: SamplingParams, out: Console) -> RequestResult:
    """Generate, showing the prefill's progress and then the text as it comes."""
    name = engine.add_request(prompt, params)
    pieces = text.stream()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=out,
        transient=True,
    )
    with bar:
        task = bar.add_task("prefill", total=len(prompt))
        events = engine.step()
        while not events:
            bar.update(task, completed=engine.computed_tokens(name))
            events = engine.step()
    while True:
        for event in events:
            if event.token is not None:
                typer.echo(pieces.push(event.token), nl=False)
        if not engine.unfinished:
            break
        events = engine.step()
    typer.echo(pieces.end())
    return engine.take_result(name)


def _summarise(out: Console, engine: Engine, text: Text, params: SamplingParams, result: RequestResult) -> None:
    stats = result.stats
    rows = {
        "prompt": f"{stats.prompt_tokens} tokens ({text.name})",
        "generated": f"{stats.output_tokens} tokens, ended by {result.finish_reason}",
        "time to first token": _milliseconds(stats.ttft),
        "time per output token": _milliseconds(stats.time_per_output_token),
        "accepted drafts": "no drafts"
        if stats.acceptance_rate is None
        else f"{stats.accepted} of {stats.drafted} ({100 * stats.acceptance_rate:.0f} %)",
        "states and scratch": f"{engine.memory().total / 2**20:,.1f} MiB",
    }
    if result.error is not None:
        rows["error"] = result.error
    if not params.greedy:
        rows["seed"] = str(result.seed)
    table = Table(show_header=False)
    for label, value in rows.items():
        table.add_row(label, value)
    report, config = engine.backend_report(), engine.config
    if config.verifies and config.max_drafts == 0:
        table.add_row("decoded by", f"verification of one token, a state stored once in {config.record_rows} tokens")
    serving = {"prefill": "prefill", "verify" if config.verifies else "decode": report["decoding"]}
    for op, choice in ((op, report["backends"][label]) for op, label in serving.items()):
        table.add_row(f"{op} backend", f"{choice['name']} ({choice['reason']})")
        for other, unmet in choice["passed_over"].items():
            table.add_row("", f"passed over {other}: {'; '.join(unmet)}")
    out.print(table)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f} ms"
