"""`rapidkda verify`: accuracy of every backend that can run here, against the float64 reference."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.progress import Progress
from rich.table import Table

from ..backends.base import Request
from ..device import Device
from ..dispatch import REGISTRY, load, resolve
from ..problem import OPS, GateKind, Op
from ..testing.accuracy import Check, check_conv, check_norm, kda_check
from ..testing.regimes import REGIMES, Regime
from ..testing.shapes import LARGE, SMALL, Shape, by_name
from .console import UserError, captured_option, console, device_option, one_backend

KDA_OPS: tuple[Op, ...] = ("prefill", "decode", "verify")
QUICK = ("chunk_and_tail", "ragged_small", "grouped_values")


def verify(
    backend: Annotated[
        str | None, typer.Option(help="One backend; it must be able to run. Default: every one that can.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda[:N]. Default: the GPU if there is one.")] = None,
    regime: Annotated[list[str] | None, typer.Option(help="Only this gate regime; may be repeated.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Only this named workload; may be repeated.")] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Operands of a model (see rapidkda capture), tiled, instead of the gate regimes."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few shapes, one second a backend.")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="One row a check instead of the worst of each group.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
) -> None:
    """Check the accuracy of the backends on every operator, over shapes and gate regimes; exit code 1 on a miss.

    Errors are relative to the float64 reference, the worst sequence and head counts. In float32 on a CPU, bfloat16 too
    everywhere.

    **Example:** `rapidkda verify --backend torch --regime slow`
    """
    place = device_option(device)
    regimes = [REGIMES[name] for name in _known("--regime", regime, tuple(REGIMES))]
    shapes = _shapes(shape, quick)
    if inputs is not None:
        if regime:
            raise UserError("--inputs and --regime must not both be given: a file stands in the place of the regimes")
        captured = captured_option(inputs)
        regimes = [captured.regime()]
        shapes = [one for one in shapes if captured.fits(one)]
    names = _runnable(one_backend(backend), place)
    dtypes = (torch.bfloat16,) if place.type == "cuda" else (torch.float32, torch.bfloat16)
    if place.type == "cpu":
        torch.set_num_threads(1)  # small problems: more threads only wait for each other
    out = console()
    out.print(f"device {Device.of(place)}; backends {', '.join(names)}; {len(shapes)} shapes; seed {seed}")
    checks: list[tuple[str, Check]] = []
    start = time.perf_counter()
    with Progress(console=out, transient=True) as progress:
        for name in names:
            jobs = list(_jobs(name, place, dtypes, regimes))
            task = progress.add_task(name, total=len(jobs) * len(shapes))
            for job in jobs:
                for one in shapes:
                    checks += ((name, check) for check in _run(name, job, one, place, seed))
                    progress.advance(task)
    out.print(_table(checks, details))
    missed = sum(not check.passed for _, check in checks)
    seconds = time.perf_counter() - start
    out.print(f"{len(checks) - missed} checks within their bars, {missed} not; {seconds:.1f} s")
    if not checks:
        raise UserError("nothing to check: no backend can run these operators on this device")
    if missed:
        raise typer.Exit(1)


Job = tuple[Request, Regime | None]  # what to ask for, and the regime where the operator has one


def _jobs(name: str, device: torch.device, dtypes: tuple[torch.dtype, ...], regimes: list[Regime]) -> Iterator[Job]:
    """What the backend says it can do here."""
    for op in OPS:
        for dtype in dtypes:
            for regime in regimes if op in KDA_OPS else [None]:
                request = Request(op, Device.of(device), dtype, gate=_gate(regime))
                forms = [request]
                if op == "verify":
                    forms += [replace(request, deferred=True), replace(request, rollback="slots")]
                yield from ((form, regime) for form in forms if not load(name).unmet(form))


def _run(name: str, job: Job, shape: Shape, device: torch.device, seed: int) -> list[Check]:
    request, regime = job
    if request.op == "conv":
        return [check_conv(shape, request.dtype, device, name, seed)]
    if regime is None:
        return [check_norm(shape, request.dtype, device, name, seed)]
    grouped = shape.hv > shape.heads
    if load(name).unmet(replace(request, key_dim=shape.key_dim, value_dim=shape.value_dim, grouped_values=grouped)):
        return []  # this backend says that it does not take this shape
    check = kda_check(request.op, request.rollback, request.deferred)
    return [check(shape, regime, request.dtype, device, name, seed)]


def _gate(regime: Regime | None) -> GateKind:
    return "softplus" if regime is not None and regime.lower_bound is None else "bounded"


def _known(option: str, given: list[str] | None, names: tuple[str, ...]) -> list[str]:
    for name in given or ():
        if name not in names:
            raise UserError(f"{option} must be one of {', '.join(names)}, got {name!r}")
    return list(given or names)


def _shapes(given: list[str] | None, quick: bool) -> list[Shape]:
    if given:
        try:
            return [by_name(name) for name in given]
        except ValueError as error:
            raise UserError(f"--{error}") from None
    if quick:
        return [shape for shape in SMALL if shape.name in QUICK]
    return [*SMALL, *LARGE]


def _runnable(name: str | None, device: torch.device) -> list[str]:
    """The backends to check: the one asked for, which must run prefill here, or all that can run something."""
    dtype = torch.bfloat16
    if name is not None:
        resolve(Request("prefill", Device.of(device), dtype), name, "--backend")
        return [name]
    return [one for one in REGISTRY if any(not load(one).unmet(Request(op, Device.of(device), dtype)) for op in OPS)]


def _table(checks: list[tuple[str, Check]], details: bool) -> Table:
    """The worst check of each group, or all of them."""
    title = "relative error against float64 / its bar, worst sequence and head"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("backend", "operator", "dtype", "regime", "shape" if details else "worst shape"):
        table.add_column(column, no_wrap=True)
    for column in ("outputs", "states", "checks", "verdict"):
        table.add_column(column, justify="right", no_wrap=True)
    groups: dict[tuple[str, ...], list[Check]] = {}
    for name, check in checks:
        operator = f"{check.op}/{check.form}" if check.form else check.op
        key = [name, operator, str(check.dtype).removeprefix("torch."), check.regime or "any"]
        groups.setdefault((*key, check.shape) if details else tuple(key), []).append(check)
    for labels, group in groups.items():
        worst = max(group, key=_strain)
        states = [check.err_state for check in group if check.err_state is not None]
        table.add_row(
            *labels[:4],
            worst.shape,
            f"{_short(max(check.err_out for check in group))} / {_short(worst.limit.out)}",
            f"{_short(max(states))} / {_short(worst.limit.state)}" if states else "none",
            str(len(group)),
            "ok" if all(check.passed for check in group) else "MISS",
        )
    return table


def _short(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def _strain(check: Check) -> float:
    """How much of its bars a check uses."""
    return max(check.err_out / check.limit.out, (check.err_state or 0.0) / check.limit.state)
