"""A result file of the battery as a summary in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def markdown(content: Mapping[str, Any]) -> str:
    """A summary: where and what was measured, tasks and log-probabilities, needles by length, speculation."""
    meta, right = content["meta"], content["reference"]
    lines = [
        f"Measured on {meta['gpu']}, torch {meta['torch']}, triton {meta['triton']}, rapidkda {meta['version']}, "
        f"revision {meta['rev']}, on {meta['date']}. Model `{meta['model']}`, weights {meta['weights'][:12]}.",
        "",
        "| backend | comparison | arithmetic % | needles % | mean abs. difference | largest | KL a token | "
        "argmax other % | continuations agree for | budget |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        f"| torch float32 | reference | {_share(right['arithmetic'])} | {_share(right['needles'])} |  |  |  |  |  |  |",
    ]
    for one in content["judged"]:
        lines.append(f"| {one['name']} | {one['comparison']} | {_judged(one)} |")
    lengths = list(dict.fromkeys(question["length"] for question in content["questions"]["needles"]))
    lines += ["", "| needles recalled, % | " + " | ".join(f"{length:,}" for length in lengths) + " |"]
    lines.append("| --- |" + " ---: |" * len(lengths))
    rows = {"torch float32, reference": content["reference_outcomes"]["needles"]}
    rows |= {f"{one['name']}, {one['comparison']}": _needle_outcomes(one) for one in content["judged"]}
    for name, outcomes in rows.items():
        if outcomes:
            cells = [_recall(content["questions"]["needles"], outcomes, length) for length in lengths]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| speculation | K | accepted % | tokens a step | tokens/s | as K = 0 |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: |")
    for one in content["judged"]:
        for found in one["speculation"]:
            lines.append(f"| {one['name']}, {one['comparison']} | {_speculation(found)} |")
    return "\n".join(lines) + "\n"


def _share(estimate: Mapping[str, Any]) -> str:
    return f"{100 * estimate['value']:.1f} [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def _judged(one: Mapping[str, Any]) -> str:
    verdict = "within" if one["within"] else "outside"
    if one["error"] is not None:
        verdict = "failed"
    if not one["tasks"]:
        return f"  |  |  |  |  |  |  | {verdict}"
    drift = one["drifts"][0]
    cells = [_share(one["tasks"][task]["right"]) for task in ("arithmetic", "needles")]
    cells += [_power(drift["mean_abs"]["value"]), _power(drift["max_abs"]), _power(drift["kl"]["value"])]
    return " | ".join([*cells, f"{100 * drift['changed']['value']:.2f}", _agreement(one), verdict])


def _power(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"


def _needle_outcomes(one: Mapping[str, Any]) -> str:
    outcomes: str = one["tasks"]["needles"]["outcomes"] if one["tasks"] else ""
    return outcomes


def _recall(questions: list[dict[str, Any]], outcomes: str, length: int) -> str:
    asked = [outcome for question, outcome in zip(questions, outcomes) if question["length"] == length]
    return f"{100 * asked.count('1') / len(asked):.1f}"


def _speculation(found: Mapping[str, Any]) -> str:
    accepted, same = found["accepted"], found["same"]
    cells = [str(found["drafts"]), "" if accepted is None else _share(accepted)]
    cells += [f"{found['tokens_per_step']:.2f}", f"{found['tokens_per_s']:,.0f}"]
    return " | ".join([*cells, f"{round(same['value'] * same['count'])} of {same['count']}"])


def _agreement(one: Mapping[str, Any]) -> str:
    found = one["agreement"]
    if found is None:
        return ""
    return f"{sum(found['lengths']) / len(found['lengths']):.0f} of {found['tokens']}"
