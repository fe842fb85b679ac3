"""`rapidkda bench`: measure this machine, and read what was measured."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from ..bench import cpu, steps
from ..bench.layer import run_layer_bench
from ..bench.peers import Cudnn, Fla, FlashKda, Peer
from ..bench.report import best, compare, markdown, plot, readme_section, readme_text
from ..bench.result import Bench, Result, Row, collect_meta
from ..bench.timing import Settings
from ..dispatch import REGISTRY
from ..errors import BackendUnavailable
from ..problem import Op
from ..testing.regimes import REGIMES, Regime
from ..testing.shapes import DECODE_BATCHES, PREFILL, VERIFY_DRAFTS, Shape, by_name, decode_shape
from .console import UserError, backend_option, captured_option, console, load_flashkda, needs, readable, writable

app = typer.Typer(help="Measure rapidkda and its peers in one run, or report what a run measured.")

GPU_BACKENDS = ("cuda", "triton")  # measured by default; torch is no serving path on a GPU

OutOption = Annotated[Path | None, typer.Option(help="Result file to write (JSON).")]


@app.command("cpu")
def bench_cpu(
    out: OutOption = None,
    regime: Annotated[list[str] | None, typer.Option(help="Gate regime; may be repeated. Default: slow.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns that every implementation has.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
) -> None:
    """The torch backend against transformers' own fallback functions on this CPU, in float32.

    **Example:** `rapidkda bench cpu --out cpu.json`
    """
    regimes = known_regimes(regime, ("slow",))
    needs("transformers", "transformers")
    target = None if out is None else writable(out, "--out")
    show = console()
    rows: list[Row] = []
    benches: tuple[Bench, ...] = ("cpu_prefill", "cpu_decode")
    for name in regimes:
        for bench in benches:
            with show.status(f"{bench}, {name}: {rounds} rounds"):
                rows += _checked(bench, name, cpu.Settings(rounds=rounds), seed)
    finish(Result(collect_meta(torch.device("cpu")), tuple(rows)), target)


def _checked(bench: Bench, regime: str, settings: cpu.Settings, seed: int) -> list[Row]:
    try:
        return cpu.rows(bench, regime, settings, seed)
    except RuntimeError as error:
        typer.echo(f"rapidkda: {error}", err=True)
        raise typer.Exit(1) from None


ShapeOption = Annotated[
    list[str] | None, typer.Option("--shape", help="Named workload; may be repeated. Default: all.")
]
RegimeOption = Annotated[
    list[str] | None, typer.Option("--regime", help="Gate regime or all; may be repeated. Default: fast and slow.")
]
BackendsOption = Annotated[
    list[str] | None, typer.Option("--backend", help="Backend of ours; may be repeated. Default: all but torch.")
]
PeersOption = Annotated[str, typer.Option("--peers", help="all, none, or names with commas: flashkda, fla, cudnn.")]
FlashOption = Annotated[
    Path | None, typer.Option("--flashkda", help="FlashKDA's library file (vllm/_flashkda_C.abi3.so); default: vllm's.")
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="Rounds of the median.")]
ReplaysOption = Annotated[int, typer.Option("--replays", min=1, help="Graph replays of one round.")]
HeadsOption = Annotated[int, typer.Option("--heads", min=1, help="Heads of a rank.")]
StateOption = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option("--state-dtype", help="Dtype of the state pool; peers are measured with float32 only."),
]
InputsOption = Annotated[
    Path | None,
    typer.Option("--inputs", help="Operands of a model (see rapidkda capture), tiled, instead of a gate regime."),
]
BatchOption = Annotated[
    list[int] | None, typer.Option("--batch", min=1, help="Requests; may be repeated. Default: 1, 8, 64, 256, 1024.")
]


@app.command("prefill")
def bench_prefill(
    out: OutOption = None,
    shape: ShapeOption = None,
    regime: RegimeOption = None,
    backend: BackendsOption = None,
    inputs: InputsOption = None,
    peers: PeersOption = "all",
    flashkda: FlashOption = None,
    rounds: RoundsOption = 5,
    replays: ReplaysOption = 10,
) -> None:
    """Chunked prefill of the named workloads on this GPU, ours and every peer that is present.

    **Example:** `rapidkda bench prefill --shape 8x2048_h16 --regime all --out result.json`
    """
    try:
        shapes = tuple(by_name(name) for name in shape) if shape else PREFILL
    except ValueError as error:
        raise UserError(f"--{error}") from None
    measure("prefill", shapes, _regimes(regime, inputs, shapes), backend, peers, flashkda, rounds, replays, out)


@app.command("decode")
def bench_decode(
    out: OutOption = None,
    batch: BatchOption = None,
    heads: HeadsOption = 16,
    regime: RegimeOption = None,
    backend: BackendsOption = None,
    inputs: InputsOption = None,
    state_dtype: StateOption = "float32",
    peers: PeersOption = "all",
    rounds: RoundsOption = 5,
    replays: ReplaysOption = 10,
) -> None:
    """One token for each request, in place in a state pool.

    **Example:** `rapidkda bench decode --batch 64 --batch 256 --heads 16`
    """
    shapes = tuple(decode_shape(n, heads) for n in batch or DECODE_BATCHES)
    regimes = _regimes(regime, inputs, shapes)
    wanted = peers if state_dtype == "float32" else "none"
    measure("decode", shapes, regimes, backend, wanted, None, rounds, replays, out, state_dtype=state_dtype)


@app.command("verify")
def bench_verify(
    out: OutOption = None,
    batch: BatchOption = None,
    drafts: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Draft tokens, 0 for decode in this form; may be repeated. Default: 1, 3, 7."),
    ] = None,
    heads: HeadsOption = 16,
    regime: RegimeOption = None,
    backend: BackendsOption = None,
    inputs: InputsOption = None,
    form: Annotated[
        list[str] | None,
        typer.Option(help="replay, deferred or slots; may be repeated. Default: replay, its states deferred and not."),
    ] = None,
    slots: Annotated[bool, typer.Option("--slots", help="The same as --form slots.")] = False,
    records: Annotated[
        int | None, typer.Option(min=2, help="Records a slot of deferred states. Default: two steps', at least 8.")
    ] = None,
    state_dtype: StateOption = "float32",
    rounds: RoundsOption = 5,
    replays: ReplaysOption = 10,
) -> None:
    """Speculative verification of 1 + k tokens for each request, all tokens of the step before accepted.

    Replay of records stores the states in every step (`cuda`), or only where the records are full (`cuda-deferred`);
    with one slot a position (`triton-slots`) there are no records.

    **Example:** `rapidkda bench verify --batch 64 --drafts 3`
    """
    if slots and form:
        raise UserError(f"--slots and --form must not both be given, got --form {form[0]}")
    for name in form or ():
        if name not in steps.SUFFIXES:
            raise UserError(f"--form must be one of {', '.join(steps.SUFFIXES)}, got {name!r}")
    wanted = tuple(x for x in steps.SUFFIXES if x in (form or (["slots"] if slots else ["replay", "deferred"])))
    longest = 1 + max(drafts or VERIFY_DRAFTS)
    if records is not None and "deferred" in wanted and records < longest:
        raise UserError(f"--records must be at least {longest}, the tokens of a step, got {records}")
    counts = [(n, k) for k in drafts or VERIFY_DRAFTS for n in batch or DECODE_BATCHES]
    shapes = tuple(decode_shape(n, heads, k) for n, k in counts)
    regimes = _regimes(regime, inputs, shapes)
    run = partial(measure, forms=wanted, records=records, state_dtype=state_dtype)
    run("verify", shapes, regimes, backend, "none", None, rounds, replays, out)


@app.command("layer")
def bench_layer(
    out: OutOption = None,
    backend: Annotated[str, typer.Option(help="Backend of ours, or auto: the fastest of each operator.")] = "auto",
    reference: Annotated[
        str | None, typer.Option(help="Backend of the reference sequence's prefill, such as flashkda. Default: ours.")
    ] = None,
    flashkda: FlashOption = None,
    regime: Annotated[list[str] | None, typer.Option(help="Gate regime; may be repeated. Default: slow.")] = None,
    rounds: RoundsOption = 5,
    replays: ReplaysOption = 10,
) -> None:
    """Convolution, KDA and gated norm of a pure and a mixed step, against gathers, copies, kernels and scatters.

    **Example:** `rapidkda bench layer --regime slow`
    """
    if flashkda is not None:
        load_flashkda(flashkda)
    target = None if out is None else writable(out, "--out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        rows = run_layer_bench(
            backend_option(backend),
            reference=None if reference is None else backend_option(reference),
            device=device,
            regimes=known_regimes(regime, ("slow",)),
            settings=Settings(rounds=rounds, replays=replays),
            log=lambda line: typer.echo(line, err=True),
        )
    except BackendUnavailable:
        raise
    except RuntimeError as error:
        typer.echo(f"rapidkda: {error}", err=True)
        raise typer.Exit(1) from None
    finish(Result(collect_meta(device), tuple(rows)), target)


def measure(
    op: Op,
    shapes: tuple[Shape, ...],
    regimes: tuple[str | Regime, ...],
    backend: list[str] | None,
    peers: str,
    flashkda: Path | None,
    rounds: int,
    replays: int,
    out: Path | None,
    *,
    forms: tuple[steps.Form, ...] = ("replay",),
    records: int | None = None,
    state_dtype: str = "float32",
) -> None:
    """Run one bench of steps, print it, write it; exit code 1 where an error of ours is above its bar."""
    target = None if out is None else writable(out, "--out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = tuple(backend_option(name) for name in backend or [name for name in REGISTRY if name in GPU_BACKENDS])
    for name in names:
        if name not in (*GPU_BACKENDS, "torch"):
            raise UserError(f"--backend must be one of {', '.join(GPU_BACKENDS)}, torch, got {name!r}")
    if device.type == "cpu" and backend is None:
        raise UserError(
            "no GPU that torch can use; measure this machine with: rapidkda bench cpu (see rapidkda doctor)"
        )
    plan = steps.Plan(
        op=op,
        shapes=shapes,
        regimes=regimes,
        backends=names,
        peers=_peers(peers, flashkda),
        device=device,
        settings=Settings(rounds=rounds, replays=replays),
        forms=forms,
        records=records,
        state_dtype=getattr(torch, state_dtype),
    )
    measured = steps.measure(plan, lambda line: typer.echo(line, err=True))
    if not measured.rows:
        raise UserError("nothing was measured: no implementation can run these workloads here")
    finish(Result(collect_meta(device, measured.copy_tb_s), tuple(measured.rows)), target)
    for line in measured.missed:
        typer.echo(f"rapidkda: {line}", err=True)
    if measured.missed:
        raise typer.Exit(1)


def _regimes(given: list[str] | None, inputs: Path | None, shapes: tuple[Shape, ...]) -> tuple[str | Regime, ...]:
    """The regimes asked for, or the operands of a file, which must fit the workloads."""
    if inputs is None:
        return tuple(known_regimes(given, ("fast", "slow")))
    if given is not None:
        raise UserError("--inputs and --regime must not both be given: a file stands in the place of a regime")
    captured = captured_option(inputs)
    for shape in shapes:
        if not captured.fits(shape):
            raise UserError(f"--shape must have the head dims of --inputs, got {shape.name}")
    return (captured.regime(),)


def _peers(names: str, flashkda: Path | None) -> tuple[Peer, ...]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if wanted == ["none"]:
        return ()
    if flashkda is not None:
        readable(flashkda, "--flashkda")
    makers: dict[str, Callable[[], Peer]] = {"flashkda": lambda: FlashKda(flashkda), "fla": Fla, "cudnn": Cudnn}
    for name in wanted:
        if name not in ("all", *makers):
            raise UserError(f"--peers must be all, none, or among {', '.join(makers)}, got {name!r}")
    return tuple(make() for name, make in makers.items() if name in wanted or wanted == ["all"])


@app.command("report")
def bench_report(
    file: Annotated[Path, typer.Argument(help="Result file.")],
    plots: Annotated[Path | None, typer.Option(help="Folder for one PNG a bench (needs matplotlib).")] = None,
) -> None:
    """Print a result file as Markdown, and draw it.

    **Example:** `rapidkda bench report cpu.json --plots plots`
    """
    result = loaded(file)
    typer.echo(markdown(result), nl=False)
    if plots is not None:
        needs("matplotlib", "bench")
        for path in plot(result, writable(plots / file.stem, "--plots")):
            typer.echo(f"wrote {path}", err=True)


@app.command("compare")
def bench_compare(
    old: Annotated[Path, typer.Argument(help="Result file.")],
    new: Annotated[Path, typer.Argument(help="Result file.")],
) -> None:
    """Print the ratio of two result files, row by row; above 1 means that the new one is faster.

    **Example:** `rapidkda bench compare old.json new.json`
    """
    typer.echo(compare(loaded(old), loaded(new)), nl=False)


@app.command("readme")
def bench_readme(
    root: Annotated[Path, typer.Option(help="Source tree.")] = Path("."),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit code 1 where it is out of date.")
    ] = False,
) -> None:
    """Write the README's performance tables from the newest result files under benchmarks/results.

    **Example:** `rapidkda bench readme --check`
    """
    path = readable(root / "README.md", "README.md under --root")
    old = path.read_text()
    try:
        new = readme_text(old, readme_section(root / "benchmarks" / "results", root))
    except ValueError as error:
        raise UserError(str(error)) from None
    if check and new != old:
        typer.echo("".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), "README.md", "generated")))
        raise typer.Exit(1)
    if new != old:
        path.write_text(new)


def known_regimes(given: list[str] | None, default: tuple[str, ...]) -> list[str]:
    """The regimes asked for; `all` stands for every one that is timed."""
    timed = [name for name, regime in REGIMES.items() if regime.timed]
    for name in given or ():
        if name != "all" and name not in timed:
            raise UserError(f"--regime must be all or one of {', '.join(timed)}, got {name!r}")
    return timed if given and "all" in given else list(given or default)


def loaded(path: Path) -> Result:
    """A result file, or a UserError that says what is wrong with it."""
    try:
        return Result.load(readable(path, "the result file"))
    except ValueError as error:
        raise UserError(str(error)) from None


def finish(result: Result, target: Path | None) -> None:
    """Print the tables and the ratios, write the file."""
    typer.echo(markdown(result), nl=False)
    for workload in dict.fromkeys(row.workload for row in result.rows):
        rows = [row for row in result.rows if row.workload == workload]
        ours = best(rows, ours=True)
        for row in rows:
            if ours is not None and row.impl != ours.impl:
                typer.echo(f"{' '.join(workload)}: {ours.impl} is {row.us / ours.us:.1f}x as fast as {row.impl}")
    if target is not None:
        result.save(target)
        typer.echo(f"wrote {target}", err=True)
