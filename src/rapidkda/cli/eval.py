"""`rapidkda eval`: what each backend does to a trained model's output."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..bench.result import collect_meta
from ..device import Device
from ..dispatch import REGISTRY
from ..engine import MtpHead
from ..engine.loading import HEAD_FILE, SHIPPED, TOKENIZER_FILES, load_model, text_config
from ..evaluation import FULL, QUICK, Battery, Candidate, Judged, Models, Report, Sizes, of_backend, reference, runnable
from ..evaluation.candidates import Comparison
from ..evaluation.markdown import markdown
from ..evaluation.parallel import Workers
from ..evaluation.plots import draw
from ..evaluation.result_file import as_json, load, save, weights_digest
from ..evaluation.statistics import Estimate
from ..problem import GateKind
from ..serving import BackendWish
from .console import UserError, console, device_option, load_flashkda, needs, readable, writable

Compared = Literal["operator", "model", "both"]


def evaluate(
    model: Annotated[
        Path,
        typer.Option(help="Folder of a trained byte-level model.", show_default="the small model of this package"),
    ] = SHIPPED,
    backend: Annotated[
        list[str] | None, typer.Option(help="Backend to judge; may be repeated. Default: every one that can run.")
    ] = None,
    comparison: Annotated[
        Compared | None,
        typer.Option(
            help="operator: only the KDA operators, on bfloat16 operands, in a float32 model. model: all of the model "
            "in bfloat16. Default: operator on a CPU, both on a GPU."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A reduced battery, a minute on a CPU.")] = False,
    out: Annotated[Path | None, typer.Option(help="Result file to write (JSON).")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for plots (needs matplotlib).")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Backends that are judged at once, in processes of their own.")] = 1,
    recorded: Annotated[
        Path | None, typer.Option(help="Run nothing: print this result file as Markdown, and draw it with --plots.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:N]. Default: the GPU if there is one.")] = None,
    flashkda: Annotated[
        Path | None, typer.Option(help="FlashKDA's library file (vllm/_flashkda_C.abi3.so); default: vllm's.")
    ] = None,
) -> None:
    """Judge backends on a trained model: tasks, log-probabilities, continuations, speculation. Exit code 1 when one is
    outside its budget.

    All are compared with the torch backend in float32 on the same held-out problems and texts. The budget: arithmetic
    and needles within one point; for the comparison "operator", mean |delta logprob| 5e-3 and KL 1e-4 a token too.

    **Example:** `rapidkda eval --quick --backend torch`
    """
    if plots is not None:
        needs("matplotlib", "eval")
    if recorded is not None:
        _show(recorded, plots)
        return
    start = time.monotonic()
    place = device_option(device)
    target = None if out is None else writable(out, "--out")
    needs("transformers", "transformers")
    show = console()
    make_battery = partial(_battery, model, place, QUICK if quick else FULL, flashkda)
    try:
        battery = make_battery()
        makers = _candidates(backend, comparison, Device.of(place), _gate(model))
        meta = {**dataclasses.asdict(collect_meta(place)), "model": model.name, "weights": weights_digest(model)}
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    candidates = [make() for make in makers]

    def tell(line: str) -> None:
        typer.echo(f"{time.monotonic() - start:4.0f} s  {line}", err=True)

    def keep(report: Report) -> None:
        if target is not None:
            save(target, as_json(report, meta))

    with Workers(make_battery, jobs) if jobs > 1 else nullcontext() as workers:
        answers = None if workers is None else workers.answers(makers)
        found = battery.run(candidates, answers, tell=tell, keep=keep)
    for table in (_task_table(found), _drift_table(found), _needle_table(found), _generation_table(found)):
        show.print(table)
    _explain(show, found)
    if target is not None:
        typer.echo(f"wrote {target}", err=True)
    _draw(as_json(found, meta), plots)
    for line in _misses(found):
        typer.echo(f"rapidkda: {line}", err=True)
    if not found.within:
        raise typer.Exit(1)


def _show(recorded: Path, plots: Path | None) -> None:
    """A result file as Markdown and plots."""
    try:
        content = load(readable(recorded, "--recorded"))
    except ValueError as error:
        raise UserError(str(error)) from None
    typer.echo(markdown(content), nl=False)
    _draw(content, plots)


def _draw(content: dict[str, Any], plots: Path | None) -> None:
    if plots is not None:
        for path in draw(content, plots):
            typer.echo(f"wrote {path}", err=True)


def _battery(folder: Path, device: torch.device, sizes: Sizes, flashkda: Path | None) -> Battery:
    """A battery from plain values, in this process or another one."""
    quiet: Any = importlib.import_module("transformers").logging
    quiet.set_verbosity_error()  # it warns at every start that its own kernels are missing
    quiet.disable_progress_bar()
    if flashkda is not None:
        load_flashkda(flashkda)
    return Battery(loaded_models(folder, device), sizes)


def loaded_models(folder: Path, device: torch.device) -> Models:
    """The models of a folder. ValueError for one with a tokenizer: the tasks are written in bytes."""
    tokenizers = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if tokenizers:
        raise ValueError(f"model must read bytes, as the tasks are written in them, got {folder} with {tokenizers[0]}")

    def load(dtype: torch.dtype) -> Any:
        return load_model(folder, dtype=dtype, device=device)

    def head(dtype: torch.dtype, backends: BackendWish) -> MtpHead:
        made = MtpHead.from_config(text_config(folder), dtype=dtype, backends=backends, device=device)
        made.load_weights(folder / HEAD_FILE)
        return made

    return Models(load, head if (folder / HEAD_FILE).is_file() else None)


def _gate(folder: Path) -> GateKind:
    return "softplus" if getattr(text_config(folder), "linear_lower_bound", None) is None else "bounded"


def _candidates(
    names: Sequence[str] | None, comparison: Compared | None, device: Device, gate: GateKind
) -> list[Callable[[], Candidate]]:
    """What makes each candidate, here or in another process."""
    for name in names or ():
        if name not in REGISTRY:
            raise UserError(f"--backend must be one of {', '.join(REGISTRY)}, got {name!r}")
    compared = comparison or ("both" if device.capability is not None else "operator")
    kinds: tuple[Comparison, ...] = ("operator", "model") if compared == "both" else (compared,)
    wanted = list(names or runnable(device, gate))
    found: list[Callable[[], Candidate]] = [
        partial(of_backend, name, kind, device, gate) for kind in kinds for name in wanted
    ]
    return [*found, reference] if "torch" in wanted and "operator" in kinds else found


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _task_table(report: Report) -> Table:
    """Tasks, one row a candidate, and whether it is inside its budget."""
    title = "right answers; difference to float32 torch on the same questions, in points; [95 % interval]"
    table = _table(title)
    for column in ("backend", "comparison", "arithmetic %", "difference", "needles %", "difference", "budget"):
        table.add_column(column, no_wrap=True)
    right = report.reference
    table.add_row("torch float32", "reference", _percent(right["arithmetic"]), "", _percent(right["needles"]))
    for one in report.judged:
        found = [one.tasks.get(task) for task in ("arithmetic", "needles")]
        cells = [_percent(x) for task in found if task is not None for x in (task.right, task.difference)]
        table.add_row(one.name, one.comparison, *(cells or ["-"] * 4), _budget(one))
    return table


def _drift_table(report: Report) -> Table:
    """Log-probabilities, one row a candidate and kind of step."""
    title = "log-probabilities of held-out text against float32 torch, nats; [95 % interval]"
    table = _table(title)
    for column in ("backend", "comparison", "steps"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens", "mean |difference|", "max", "KL a token", "argmax other %"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in report.judged:
        for place, drift in enumerate(one.drifts):
            table.add_row(
                *((one.name, one.comparison) if place == 0 else ("", "")),
                drift.kind,
                f"{drift.tokens:,}",
                _short(drift.mean_abs),
                f"{drift.max_abs:.1e}".replace("e-0", "e-"),
                _short(drift.kl),
                _percent(drift.changed),
            )
    return table


def _budget(one: Judged) -> str:
    if one.error is not None:
        return "FAILED"
    return "within" if one.within else "OUTSIDE"


def _needle_table(report: Report) -> Table:
    """Recall by length of the text."""
    lengths = list(dict.fromkeys(question.length for question in report.questions["needles"]))
    table = _table("needles recalled, %, by tokens of the text")
    for column in ("backend", "comparison", *(f"{length:,}" for length in lengths)):
        table.add_column(column, no_wrap=True)
    rows = [("torch float32", "reference", report.reference_outcomes["needles"])]
    rows += [(one.name, one.comparison, one.tasks["needles"].outcomes) for one in report.judged if one.tasks]
    for name, comparison, outcomes in rows:
        cells = []
        for length in lengths:
            asked = [o for q, o in zip(report.questions["needles"], outcomes) if q.length == length]
            cells.append(f"{100 * asked.count('1') / len(asked):.1f}")
        table.add_row(name, comparison, *cells)
    return table


def _generation_table(report: Report) -> Table:
    """Greedy continuations and speculation."""
    tokens = report.sizes.new_tokens
    title = f"greedy continuations of {tokens} tokens; speculation with the MTP head, K drafts a step"
    table = _table(title)
    for column in ("backend", "comparison"):
        table.add_column(column, no_wrap=True)
    for column in ("agree for", "throughout", "K", "accepted %", "tokens/step", "tokens/s", "as K = 0"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in report.judged:
        if one.agreement is None:
            continue
        lengths = one.agreement.lengths
        first = [f"{sum(lengths) / len(lengths):.1f}", _of(one.agreement.whole)]
        for place, found in enumerate(one.speculation):
            table.add_row(
                *([one.name, one.comparison, *first] if place == 0 else [""] * 4),
                str(found.drafts),
                "-" if found.accepted is None else _percent(found.accepted),
                f"{found.tokens_per_step:.2f}",
                f"{found.tokens_per_s:,.0f}",
                _of(found.same),
            )
        if not one.speculation:
            table.add_row(one.name, one.comparison, *first)
    return table


def _explain(show: Console, report: Report) -> None:
    lives = sorted(life for head in report.half_lives for life in head.tokens)
    if lives:
        low, middle, high = (lives[int(part * (len(lives) - 1))] for part in (0.1, 0.5, 0.9))
        deciles = f"{low:.3g}, {middle:.3g}, {high:.3g} tokens (deciles 1, 5 and 9)"
        show.print(f"half-lives of the key channels on real text: {deciles}")
    seconds = ", ".join(f"{one.name} ({one.comparison}) {one.seconds:.0f}" for one in report.judged)
    show.print(f"seconds: {seconds}")
    show.print("operator: the KDA operators on bfloat16 operands in a float32 model; model: all of it in bfloat16")


def _misses(report: Report) -> Iterable[str]:
    for one in report.judged:
        if one.error is not None:
            yield f"{one.name}, {one.comparison}: failed: {one.error}"
        for verdict in one.verdicts:
            if not verdict.within:
                yield f"{one.name}: {verdict.what}: {verdict.value:.2e} above {verdict.limit:.2e}"


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _of(estimate: Estimate) -> str:
    return f"{round(estimate.value * estimate.count)} of {estimate.count}"


def _short(estimate: Estimate) -> str:
    return f"{estimate.value:.1e} [{estimate.low:.1e}, {estimate.high:.1e}]".replace("e-0", "e-")
