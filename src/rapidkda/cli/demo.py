"""`rapidkda demo`: real text through the shipped GLM-5.3-Flash type model, in transformers and in the engine."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from ..device import Device
from ..dispatch import Choice
from ..engine import Engine, EngineConfig, SamplingParams
from ..engine.loading import SHIPPED, load_model, load_text
from ..serving import BackendWish
from .console import UserError, backend_option, console, needs, readable

TEXT = Path(__file__).parent.parent / "data" / "us-constitution.txt"
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # largest logit difference, relative to the largest logit
WARM_UP = 64  # tokens
SHOWN = 72  # bytes of the prompt before what follows


@dataclass
class Pass:
    """One run over the text: tokens that followed, the logits of each [N, vocabulary], seconds to the first and on."""

    generated: list[int]
    logits: Tensor
    prefill_seconds: float
    decode_seconds: float


def demo(
    text: Annotated[
        Path,
        typer.Option(help="Text file; its bytes are the tokens.", show_default="the Constitution of the United States"),
    ] = TEXT,
    tokens: Annotated[int, typer.Option(min=1, help="Bytes of the text to prefill.")] = 2048,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of one prefill chunk.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate greedily after the text.")] = 48,
    backend: Annotated[str, typer.Option(help="Backend of prefill and decode, or auto.")] = "auto",
) -> None:
    """Run a text through a small GLM-5.3-Flash type model, in transformers and in rapidkda's engine, and compare.

    The model is the one that ships with this package: the released model's layers in small, trained on bytes of
    English. It goes on with the text; both runs must agree. Exit code 1 when they do not.

    **Example:** `rapidkda demo --text README.md --tokens 1000`
    """
    name = backend_option(backend)
    prompt = list(readable(text, "--text").read_bytes()[:tokens])
    if not prompt:
        raise UserError(f"--text must not be empty, got {text}")
    needs("transformers", "transformers")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    out = console()
    model = _model(len(prompt) + new_tokens, dtype, device)
    engine = _engine(model, chunk, name)  # before the long run: a backend asked for by name must be able to do it all
    out.print(f"{len(prompt)} bytes of {text.name} in chunks of {chunk}, then {new_tokens} tokens; {Device.of(device)}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    out.print(f"model: {parameters / 1e6:.1f} M parameters, {str(dtype)[6:]}, 3 KDA layers to 1 of attention")
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=out
    ) as progress:
        plain = _timed_pass(partial(_run_model, model, chunk), prompt, new_tokens, progress, "transformers")
        fast = _timed_pass(partial(_run_engine, engine), prompt, new_tokens, progress, "rapidkda engine")
    choices = engine.model.first_layer.choices
    _explain(partial(out.print, markup=False), choices["prefill"], choices["decode"])
    out.print(_table(plain, fast, len(prompt)))
    difference, same = _compare(plain, fast)
    limit = LIMIT[dtype]
    verdict = "within" if difference <= limit else "ABOVE"
    out.print(f"largest logit difference: {difference:.1e} of the largest logit, {verdict} the limit of {limit:.0e}")
    out.print(f"greedy tokens: the first {same} of {new_tokens} are the same")
    out.print(_continuation(prompt, fast.generated), markup=False)
    if not difference <= limit:
        raise typer.Exit(1)


def _model(context: int, dtype: torch.dtype, device: torch.device) -> Any:
    """The shipped model, whose attention must see the whole context: then two correct runs choose the same tokens."""
    logging: Any = importlib.import_module("transformers").logging
    logging.set_verbosity_error()  # it warns at every start that its own kernels are missing
    logging.disable_progress_bar()
    model = load_model(SHIPPED, dtype=dtype, device=device)
    most = model.config.get_text_config().index_topk
    if context > most:
        raise UserError(f"--tokens and --new-tokens must be at most {most:,} together, got {context:,}")
    return model


def _continuation(prompt: list[int], generated: list[int]) -> str:
    """The end of the text and what the model goes on with, on one line."""
    stream = load_text(SHIPPED, 256).stream()
    pieces = ["".join(map(stream.push, tokens)) for tokens in (prompt[-SHOWN:], generated)]
    before, after = (" ".join(piece.split(" ")).replace("\n", " ") for piece in pieces)
    return f"... {before}[{after}{stream.end()}]"


def _engine(model: Any, chunk: int, backend: str) -> Engine:
    """One request at a time. The engine shares the model's weights, and the model stays as it is."""
    config = EngineConfig(
        max_num_batched_tokens=chunk + 1,
        max_num_seqs=1,
        prefill_chunk=chunk,
        backends=BackendWish(prefill=backend, decode=backend),
    )
    return Engine(model, config)


Run = Callable[[list[int], int, Callable[[int], None]], Pass]


def _timed_pass(run: Run, prompt: list[int], new_tokens: int, progress: Progress, name: str) -> Pass:
    """Prefill in chunks, then greedy decode, after a short warm-up."""
    run(prompt[:WARM_UP], 2, lambda done: None)
    task = progress.add_task(name, total=len(prompt) + new_tokens)
    return run(prompt, new_tokens, lambda done: progress.update(task, completed=done))


@torch.inference_mode()
def _run_model(model: Any, chunk: int, prompt: list[int], new_tokens: int, show: Callable[[int], None]) -> Pass:
    """The model's own forward pass and cache."""
    keyword = _cache_keyword(model)
    generated: list[int] = []
    cache, logits = None, []
    start = first = _now(model.device)
    pieces = list(torch.tensor([prompt], device=model.device).split(chunk, dim=1))
    done = 0
    while len(generated) < new_tokens:
        piece = pieces.pop(0) if pieces else torch.tensor([generated[-1:]], device=model.device)
        result = model(input_ids=piece, use_cache=True, **{keyword: cache})
        cache = result[keyword]
        done += piece.shape[1]
        if not pieces:
            logits.append(result.logits[0, -1])
            generated.append(int(logits[-1].argmax()))
            if len(generated) == 1:
                first = _now(model.device)
        show(done)
    end = _now(model.device)
    return Pass(generated, torch.stack(logits).float().cpu(), first - start, end - first)


def _run_engine(engine: Engine, prompt: list[int], new_tokens: int, show: Callable[[int], None]) -> Pass:
    name = engine.add_request(prompt, SamplingParams(max_new_tokens=new_tokens, keep_logits=True))
    while engine.unfinished:
        show(engine.computed_tokens(name))
        engine.step()
    show(len(prompt) + new_tokens)
    result = engine.take_result(name)
    stats = result.stats
    if result.logits is None or stats.ttft is None or stats.finished is None or stats.first_token is None:
        raise RuntimeError(f"the engine ended the text by {result.finish_reason}: {result.error}")
    return Pass(list(result.tokens), result.logits, stats.ttft, stats.finished - stats.first_token)


def _cache_keyword(model: Any) -> str:
    """What this release of transformers calls the cache, as an argument and as a result."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _compare(plain: Pass, fast: Pass) -> tuple[float, int]:
    """Largest logit difference over the largest logit, as long as both read the same tokens, and for how many."""
    pairs = zip(plain.generated, fast.generated, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(plain.generated))
    want, got = plain.logits[: same + 1], fast.logits[: same + 1]
    if not bool(torch.isfinite(got).all()):
        return float("inf"), same
    return float((got - want).abs().max() / want.abs().max()), same


def _explain(show: Callable[[str], None], prefill: Choice, decode: Choice) -> None:
    for label, choice in (("prefill", prefill), ("decode", decode)):
        show(f"{label} backend: {choice.name} ({choice.reason})")
    for name, reasons in prefill.passed_over.items():
        show(f"  passed over: {name}: {'; '.join(reasons)}")


def _table(plain: Pass, fast: Pass, prompt: int) -> Table:
    table = Table()
    for column in ("", "prefill tokens/s", "decode tokens/s"):
        table.add_column(column, justify="left" if not column else "right")
    steps = len(plain.generated) - 1  # the prefill gives the first token
    for name, one in (("untouched transformers", plain), ("rapidkda engine", fast)):
        table.add_row(name, f"{prompt / one.prefill_seconds:,.0f}", f"{steps / one.decode_seconds:,.1f}")
    ratios = plain.prefill_seconds / fast.prefill_seconds, plain.decode_seconds / fast.decode_seconds
    table.add_row("ratio", *(f"{ratio:.1f}x" for ratio in ratios))
    return table
