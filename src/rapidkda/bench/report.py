"""What a result file says: a Markdown table, plots, a row-by-row comparison, and the README's own table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .result import BENCHES, Bench, Result, Row

OURS = ("cuda", "triton", "torch")
TITLES: dict[Bench, str] = {
    "prefill": "Prefill",
    "decode": "Decode, one token a request",
    "verify": "Speculative verification",
    "layer": "Whole layer",
    "cpu_prefill": "Prefill on a CPU",
    "cpu_decode": "Decode on a CPU",
}


def markdown(result: Result, worst_only: bool = False) -> str:
    """Every row, grouped by bench, the implementations of a workload side by side.

    With `worst_only`, a shape has one line, its worst regime for us; the summaries still count every row.
    """
    meta = result.meta
    facts = [meta.gpu, *(f"{name} {value}" for name, value in _facts(result) if value)]
    lines = [f"Measured on {', '.join(facts)}.", *([f"Note: {meta.note}."] if meta.note else []), ""]
    for bench in BENCHES:
        rows = [row for row in result.rows if row.bench == bench]
        if rows:
            shown = _worst(rows) if worst_only else rows
            lines += [f"### {TITLES[bench]}", "", *_table(shown), "", *_summary(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _worst(rows: list[Row]) -> list[Row]:
    """Of every shape, the regime in which we do worst: against the best peer, or by time where no peer was measured."""
    kept: dict[str, tuple[tuple[bool, float], tuple[str, str, str]]] = {}
    for workload in dict.fromkeys(row.workload for row in rows):
        here = [row for row in rows if row.workload == workload]
        ours, peer = best(here, ours=True), best(here, ours=False)
        if ours is not None:
            badness = (peer is not None, ours.us / peer.us if peer else ours.us)
            entry = (badness, workload)
            kept[workload[1]] = max(kept.get(workload[1], entry), entry)
    chosen = {workload for _, workload in kept.values()}
    return [row for row in rows if row.workload in chosen]


def _facts(result: Result) -> Iterable[tuple[str, str | None]]:
    meta = result.meta
    yield "driver", meta.driver
    yield "torch", meta.torch
    yield "triton", meta.triton
    yield "rapidkda", meta.version
    yield "revision", meta.rev
    yield "on", meta.date
    yield "copy bandwidth", f"{meta.copy_tb_s:.2f} TB/s" if meta.copy_tb_s else None


def _table(rows: list[Row]) -> list[str]:
    """One line a workload; the ratio is the best peer's time over our best time, so above 1 means faster."""
    impls = list(dict.fromkeys(row.impl for row in rows))
    floors = any(row.floor_us for row in rows)
    heads = ["shape", "regime", *(["floor us"] if floors else []), *(f"{impl} us" for impl in impls)]
    heads += ["best peer / ours", *(["ours / floor"] if floors else []), "error of ours: outputs, states"]
    lines = ["| " + " | ".join(heads) + " |", "| --- | --- |" + " ---: |" * (len(heads) - 2)]
    for workload in dict.fromkeys(row.workload for row in rows):
        by_impl = {row.impl: row for row in rows if row.workload == workload}
        ours = best(by_impl.values(), ours=True)
        peer = best(by_impl.values(), ours=False)
        floor = next((row.floor_us for row in by_impl.values() if row.floor_us), None)
        cells = [workload[1], workload[2]]
        if floors:
            cells.append(_time(floor))
        cells += [_time(by_impl[impl].us) if impl in by_impl else "" for impl in impls]
        cells.append(f"{peer.us / ours.us:.2f}" if ours and peer else "")
        if floors:
            cells.append(f"{ours.us / floor:.2f}" if ours and floor else "")
        cells.append(f"{_error(ours.err_out)}, {_error(ours.err_state)}" if ours else "")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _summary(rows: list[Row]) -> list[str]:
    """A line a regime: the geometric mean and the least of best peer / ours."""
    ratios: dict[str, list[float]] = {}
    for workload in dict.fromkeys(row.workload for row in rows):
        here = [row for row in rows if row.workload == workload]
        ours, peer = best(here, ours=True), best(here, ours=False)
        if ours and peer:
            ratios.setdefault(workload[2], []).append(peer.us / ours.us)
    lines = [
        f"- {regime}: best peer / ours {geometric_mean(some):.2f} in the geometric mean of {len(some)}, "
        f"{min(some):.2f} at least"
        for regime, some in ratios.items()
    ]
    return [*lines, ""] if lines else []


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def best(rows: Iterable[Row], ours: bool) -> Row | None:
    """The fastest of our rows, or of the peers'."""
    return min((row for row in rows if is_ours(row.impl) == ours), key=lambda row: row.us, default=None)


def is_ours(impl: str) -> bool:
    """Names are a backend of ours, perhaps with a form of it, or a peer; the sequence that we re-create is a peer."""
    return impl.split("-")[0] in OURS and not impl.endswith("-reference-sequence")


def _time(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us:,.0f}" if us >= 100 else f"{us:.3g}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def compare(old: Result, new: Result) -> str:
    """The ratio old / new of every row that both files have; above 1 means that the new one is faster."""
    before = {(*row.workload, row.impl): row for row in old.rows}
    lines = [f"old: {old.meta.rev} on {old.meta.gpu}", f"new: {new.meta.rev} on {new.meta.gpu}", ""]
    lines += [
        "| bench | shape | regime | impl | old us | new us | old / new |",
        "| --- | --- | --- | --- |" + " ---: |" * 3,
    ]
    ratios = []
    for row in new.rows:
        was = before.pop((*row.workload, row.impl), None)
        if was is None:
            lines.append(f"| {row.bench} | {row.shape} | {row.regime} | {row.impl} | | {_time(row.us)} | new |")
            continue
        ratios.append(was.us / row.us)
        cells = (row.bench, row.shape, row.regime, row.impl, _time(was.us), _time(row.us), f"{ratios[-1]:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"| {' | '.join(key)} | {_time(row.us)} | | gone |" for key, row in before.items()]
    if ratios:
        lines += ["", f"geometric mean of old / new over {len(ratios)} rows: {geometric_mean(ratios):.3f}"]
    return "\n".join(lines) + "\n"


def plot(result: Result, stem: Path) -> list[Path]:
    """One PNG a bench: time of every implementation on every workload, with the floor. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for bench in BENCHES:
        rows = [row for row in result.rows if row.bench == bench]
        if not rows:
            continue
        figure = _figure(pyplot, rows, TITLES[bench], result.meta.gpu)
        path = stem.with_name(f"{stem.name}-{bench}.png")
        figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)
    return written


def _figure(pyplot: Any, rows: list[Row], title: str, gpu: str) -> Any:
    workloads = list(dict.fromkeys(row.workload for row in rows))
    impls = list(dict.fromkeys(row.impl for row in rows))
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.28 * len(workloads)))
    for impl in impls:
        shown = [(n, row.us) for n, w in enumerate(workloads) for row in rows if row.workload == w and row.impl == impl]
        axes.plot([us for _, us in shown], [n for n, _ in shown], "o", label=impl)
    floors = {row.workload: row.floor_us for row in rows if row.floor_us}
    if floors:
        axes.plot(list(floors.values()), [workloads.index(w) for w in floors], "k|", markersize=12, label="I/O floor")
    axes.set_yticks(range(len(workloads)), [f"{shape}, {regime}" for _, shape, regime in workloads])
    axes.set_ylim(len(workloads) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.set_xlabel("microseconds a call, median")
    axes.set_title(f"{title}\n{gpu}", fontsize="medium")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


README_BEGIN = "<!-- generated by `rapidkda bench readme`: begin -->"
README_END = "<!-- generated by `rapidkda bench readme`: end -->"


def newest(folder: Path) -> dict[Path, set[Bench]]:
    """For every machine under `folder`, the newest files that between them measured each backend of ours on each bench,
    and the benches that they are wanted for.

    Newest first, by the date in their meta.
    """
    dated = sorted(((Result.load(path), path) for path in folder.glob("*/*.json")), key=lambda r: r[0].meta.date)
    seen: set[tuple[Path, Bench, str]] = set()
    kept: dict[Path, set[Bench]] = {}
    for result, path in reversed(dated):
        measured = {(path.parent, row.bench, row.impl.split("-")[0]) for row in result.rows if is_ours(row.impl)}
        wanted = {bench for _, bench, _ in measured - seen}
        if wanted:
            kept[path] = wanted
        seen |= measured
    return kept


def readme_section(folder: Path, root: Path) -> str:
    """The README's performance section: every machine's newest results in brief, with the files that hold them."""
    parts = []
    for path, benches in newest(folder).items():
        whole = Result.load(path)
        result = Result(whole.meta, tuple(row for row in whole.rows if row.bench in benches))
        place = path.relative_to(root).as_posix()
        body = markdown(result, worst_only=True).replace("### ", "#### ")
        parts.append(
            f"### {', '.join(sorted({row.impl for row in result.rows if is_ours(row.impl)}))} on {result.meta.gpu}\n\n"
            f"The worst regime of every shape; all of [{place}]({place}): `rapidkda bench report {place}`. {body}"
        )
    return "\n".join(parts) if parts else "No result file is recorded yet.\n"


def readme_text(text: str, section: str) -> str:
    """The README with its generated section replaced; ValueError where the markers are missing."""
    before, begin, rest = text.partition(README_BEGIN)
    _, end, after = rest.partition(README_END)
    if not begin or not end:
        raise ValueError(f"README must hold the lines {README_BEGIN!r} and {README_END!r}")
    return f"{before}{README_BEGIN}\n{section}{README_END}{after}"
