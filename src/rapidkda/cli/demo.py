"""`rapidkda demo`: the main job on real text, a small GLM-5.3-Flash type model with and without rapidkda."""

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

from ..backends.base import Request
from ..device import Device
from ..dispatch import Choice, resolve
from ..problem import Op
from .console import UserError, backend_option, console, needs, readable

TEXT = Path(__file__).parent.parent / "data" / "us-constitution.txt"
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # largest logit difference, relative to the largest logit
WARM_UP = 64  # tokens
OPS: tuple[Op, ...] = ("prefill", "decode", "conv", "norm")  # what the model asks for


@dataclass
class Pass:
    """One run over the text: seconds, the logits of every position [T + N, vocabulary], the tokens that follow."""

    prefill_seconds: float
    decode_seconds: float
    logits: Tensor
    generated: list[int]


def demo(
    text: Annotated[
        Path,
        typer.Option(help="Text file; its bytes are the tokens.", show_default="the Constitution of the United States"),
    ] = TEXT,
    tokens: Annotated[int, typer.Option(min=1, help="Bytes of the text to prefill.")] = 2048,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of one prefill chunk.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode greedily after the text.")] = 48,
    backend: Annotated[str, typer.Option(help="Backend of prefill and decode, or auto.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the model's weights.")] = 0,
) -> None:
    """Run a text through a small GLM-5.3-Flash type model, untouched and with rapidkda, and compare the two.

    The model has the released model's layers (KDA, sparse attention, mixture of experts) in small, with seeded random
    weights, so what it writes has no meaning; that both runs agree has. Exit code 1 when they do not.

    **Example:** `rapidkda demo --text README.md --tokens 1000`
    """
    name = backend_option(backend)
    prompt = list(readable(text, "--text").read_bytes()[:tokens])
    if not prompt:
        raise UserError(f"--text must not be empty, got {text}")
    needs("transformers", "transformers")
    from ..integrations.transformers import accelerate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for op in OPS:  # before the long run: a backend asked for by name must be able to do it all
        resolve(Request(op, Device.of(device), dtype), name, "--backend")
    out = console()
    out.print(f"{len(prompt)} bytes of {text.name} in chunks of {chunk}, then {new_tokens} tokens; {Device.of(device)}")
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=out
    ) as progress:
        model = _model(seed, len(prompt) + new_tokens).to(device, dtype)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        out.print(f"model: {parameters / 1e6:.1f} M parameters, {str(dtype)[6:]}, 3 KDA layers to 1 of attention")
        plain = _timed_pass(model, prompt, chunk, new_tokens, progress, "untouched model")
        report = accelerate(model, backend=name, decode_backend=name)
        fast = _timed_pass(model, prompt, chunk, new_tokens, progress, "with rapidkda")
    _explain(partial(out.print, markup=False), report.prefill, report.decode)
    out.print(_table(plain, fast, len(prompt), new_tokens))
    difference, same = _compare(plain, fast, len(prompt))
    limit = LIMIT[dtype]
    verdict = "within" if difference <= limit else "ABOVE"
    out.print(f"largest logit difference: {difference:.1e} of the largest logit, {verdict} the limit of {limit:.0e}")
    out.print(f"greedy tokens: the first {same} of {new_tokens} are the same")
    if not difference <= limit:
        raise typer.Exit(1)


def _model(seed: int, context: int) -> Any:
    """A model whose attention sees the whole context, so that two correct runs make the same discrete choices."""
    transformers: Any = importlib.import_module("transformers")
    from ..testing.models import build_glm5_next

    transformers.logging.set_verbosity_error()  # it warns at every start that its own kernels are missing
    pool = 16
    return build_glm5_next(
        seed, hidden_size=256, heads=4, index_kpool=pool, index_topk=max(2048, -(-context // pool) * pool)
    )


def _timed_pass(model: Any, prompt: list[int], chunk: int, new_tokens: int, progress: Progress, name: str) -> Pass:
    """Prefill in chunks, then greedy decode, after a short warm-up."""
    _run(model, prompt[:WARM_UP], WARM_UP // 2, 2, lambda step: None)
    task = progress.add_task(name, total=len(prompt) + new_tokens)
    return _run(model, prompt, chunk, new_tokens, lambda step: progress.advance(task, step))


@torch.inference_mode()
def _run(model: Any, prompt: list[int], chunk: int, new_tokens: int, advance: Callable[[int], None]) -> Pass:
    ids = torch.tensor([prompt], device=model.device)
    keyword = _cache_keyword(model)
    cache, logits = None, []
    start = _now(model.device)
    for piece in ids.split(chunk, dim=1):
        result = model(input_ids=piece, use_cache=True, **{keyword: cache})
        cache = result[keyword]
        logits.append(result.logits[0])
        advance(piece.shape[1])
    middle = _now(model.device)
    generated: list[int] = []
    for _ in range(new_tokens):
        token = logits[-1][-1:].argmax(-1, keepdim=True)
        generated.append(int(token))
        result = model(input_ids=token, use_cache=True, **{keyword: cache})
        cache = result[keyword]
        logits.append(result.logits[0])
        advance(1)
    end = _now(model.device)
    return Pass(middle - start, end - middle, torch.cat(logits).float().cpu(), generated)


def _cache_keyword(model: Any) -> str:
    """What this release of transformers calls the cache, as an argument and as a result."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _compare(plain: Pass, fast: Pass, prompt: int) -> tuple[float, int]:
    """Largest logit difference over the largest logit, as long as both read the same tokens, and for how many."""
    pairs = zip(plain.generated, fast.generated, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(plain.generated))
    rows = prompt + same
    want, got = plain.logits[:rows], fast.logits[:rows]
    if not bool(torch.isfinite(got).all()):
        return float("inf"), same
    return float((got - want).abs().max() / want.abs().max()), same


def _explain(show: Callable[[str], None], prefill: Choice, decode: Choice) -> None:
    for label, choice in (("prefill", prefill), ("decode", decode)):
        show(f"{label} backend: {choice.name} ({choice.reason})")
    for name, reasons in prefill.passed_over.items():
        show(f"  passed over: {name}: {'; '.join(reasons)}")


def _table(plain: Pass, fast: Pass, prompt: int, new_tokens: int) -> Table:
    table = Table()
    for column in ("", "prefill tokens/s", "decode tokens/s"):
        table.add_column(column, justify="left" if not column else "right")
    for name, one in (("untouched transformers", plain), ("with rapidkda", fast)):
        table.add_row(name, f"{prompt / one.prefill_seconds:,.0f}", f"{new_tokens / one.decode_seconds:,.1f}")
    ratios = plain.prefill_seconds / fast.prefill_seconds, plain.decode_seconds / fast.decode_seconds
    table.add_row("ratio", *(f"{ratio:.1f}x" for ratio in ratios))
    return table
