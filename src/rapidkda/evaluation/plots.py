"""Plots of a result file of the battery. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

DEPTHS = 6  # rows of the needle map
MAPS = 5  # needle maps side by side


def draw(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Needle maps, histograms of log-probability differences and of half-lives, as PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"needles": _needles(content), "logprobs": _logprobs(content), "half_lives": _half_lives(content)}
    paths = []
    for name, figure in drawn.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120, bbox_inches="tight")
        pyplot.close(figure)
    return paths


def needle_map(questions: list[dict[str, Any]], outcomes: str) -> tuple[list[int], np.ndarray]:
    """The lengths, and recall [DEPTHS, lengths]; NaN where nothing was asked."""
    lengths = sorted({one["length"] for one in questions})
    hits, asked = np.zeros((2, DEPTHS, len(lengths)))
    for one, outcome in zip(questions, outcomes, strict=True):
        cell = min(DEPTHS - 1, int(one["depth"] * DEPTHS)), lengths.index(one["length"])
        asked[cell] += 1
        hits[cell] += outcome == "1"
    return lengths, np.divide(hits, asked, out=np.full(hits.shape, np.nan), where=asked > 0)


def _needles(content: Mapping[str, Any]) -> Any:
    from matplotlib import pyplot

    maps = {"reference": content["reference_outcomes"]["needles"]}
    for one in content["judged"]:
        if "needles" in one["tasks"]:
            maps[f"{one['name']}, {one['comparison']}"] = one["tasks"]["needles"]["outcomes"]
    columns = min(MAPS, len(maps))
    rows = -(-len(maps) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(3.2 * columns, 3 * rows), squeeze=False, layout="constrained"
    )
    image: Any = None
    for axis in axes.flat[len(maps) :]:
        axis.axis("off")
    for axis, (name, outcomes) in zip(axes.flat, maps.items()):
        lengths, recall = needle_map(content["questions"]["needles"], outcomes)
        image = axis.imshow(100 * recall, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=90)
        axis.set_yticks(range(DEPTHS), [f"{100 * row // DEPTHS} %" for row in range(DEPTHS)])
        axis.set(title=name, xlabel="tokens", ylabel="depth")
    figure.colorbar(image, ax=axes, label="needles recalled, %")
    return figure


def _logprobs(content: Mapping[str, Any]) -> Any:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for one in content["judged"]:
        if one["drifts"]:
            counts = np.array(one["drifts"][0]["histogram"])
            style = "-" if one["comparison"] == "operator" else "--"
            label = f"{one['name']}, {one['comparison']}"
            axis.stairs(100 * counts / counts.sum(), content["histogram_edges"], label=label, linestyle=style)
    axis.set(xscale="log", xlabel="|difference of log-probability| against float32 torch, nats", ylabel="tokens, %")
    if content["judged"]:
        axis.legend()
    return figure


def _half_lives(content: Mapping[str, Any]) -> Any:
    from matplotlib import pyplot

    heads = content["half_lives"]
    layers = sorted({one["layer"] for one in heads})
    figure, axes = pyplot.subplots(
        len(layers), 1, figsize=(7, 1.6 * len(layers)), squeeze=False, sharex=True, layout="constrained"
    )
    edges = np.logspace(-1, 5, 49)
    for axis, layer in zip(axes[:, 0], layers):
        for one in heads:
            if one["layer"] == layer:
                lives = np.clip(one["tokens"], edges[0], edges[-1])
                axis.stairs(np.histogram(lives, edges)[0], edges, label=f"head {one['head']}")
        axis.set(xscale="log", ylabel=f"layer {layer}\nchannels")
        axis.legend(fontsize="small")
    axes[-1, 0].set_xlabel("half-life of a key channel on real text, tokens")
    return figure
