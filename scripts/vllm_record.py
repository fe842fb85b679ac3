"""vLLM serves a Kimi-Linear model with rapidkda's prefill off and on: the same greedy tokens? How fast?

    pip install 'rapidkda[cuda,vllm]'
    python scripts/vllm_record.py --out record.json                 # makes a random-weight checkpoint first
    python scripts/vllm_record.py --out record.json --model FOLDER  # any Kimi-Linear checkpoint

One GPU, offline. Three engines start side by side: `off` (vLLM's own prefill), `on` (rapidkda's) and `control` (vLLM's
own again, with another chunk size). They take turns, so nothing else runs while one is measured.

Tokens: every prompt is continued greedily. Where `on` leaves `off`, the record holds both candidates' log-probabilities
on both sides. The control shows how far vLLM leaves itself when only its rounding changes. The checkpoint that is made
has a known continuation, with which every side is compared, too.

Times: time to first token of single prompts, and a whole batch with chunked prefill; sides alternate, medians count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kimi_linear_checkpoint import Sizes, continuation, recalls, write
from vllm_engines import CANDIDATES, Settings, servers

SINGLE_LENGTHS = (100, 1000, 4000, 8000)


def prompts(lengths: list[int], seed: int) -> list[str]:
    """Seeded text of so many bytes: one token a byte with the checkpoint's own tokenizer."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz      .,"
    return ["".join(draw.choices(letters, k=length)) for length in lengths]


def spread(count: int, shortest: int, longest: int) -> list[int]:
    """Lengths in geometric steps, the ends included, in an order that mixes them."""
    lengths = [round(shortest * (longest / shortest) ** (i / max(count - 1, 1))) for i in range(count)]
    random.Random(0).shuffle(lengths)
    return lengths


def compare(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> dict[str, Any]:
    """Where two sides' greedy tokens part, and how far their log-probabilities differ while the contexts are equal."""
    identical, parted, differences = 0, [], []
    for index, (left, right) in enumerate(zip(want, got, strict=True)):
        place = next((i for i, pair in enumerate(zip(left["tokens"], right["tokens"])) if pair[0] != pair[1]), None)
        same = len(left["tokens"]) if place is None else place + 1  # the contexts before these tokens are equal
        for ours, theirs in zip(left["steps"][:same], right["steps"][:same], strict=True):
            differences += [abs(ours[token] - theirs[token]) for token in ours if token in theirs]
        if place is None:
            identical += 1
            continue
        a, b = left["tokens"][place], right["tokens"][place]
        steps = left["steps"][place], right["steps"][place]
        parted.append(
            {
                "prompt": index,
                "prompt_tokens": left["prompt"],
                "at": place,
                "tokens": [a, b],
                "logprobs": [[step.get(a), step.get(b)] for step in steps],
                "gaps": [_gap(steps[0], a, b), _gap(steps[1], b, a)],
            }
        )
    return {
        "prompts": len(want),
        "identical": identical,
        "parted": parted,
        "largest_gap": max((gap for part in parted for gap in part["gaps"] if gap is not None), default=0.0),
        "logprob_difference_mean": statistics.fmean(differences),
        "logprob_difference_max": max(differences),
        "logprobs_compared": len(differences),
    }


def known(texts: list[str], answers: list[dict[str, Any]]) -> dict[str, int]:
    """How many prompts have a continuation that is known beforehand, and how many of those a side continued so."""
    expected = [continuation(text.encode(), len(answer["tokens"])) for text, answer in zip(texts, answers, strict=True)]
    right = sum(want == bytes(answer["tokens"]) for want, answer in zip(expected, answers) if want is not None)
    return {"prompts": sum(want is not None for want in expected), "right": right}


def _gap(step: dict[int, float], best: int, other: int) -> float | None:
    """By how much a side preferred its token; None when the other was not among its candidates."""
    return step[best] - step[other] if other in step else None


def median_times(runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs]
    middle = statistics.median(seconds)
    first = [statistics.median(run["first_token_seconds"]) for run in runs if run["first_token_seconds"]]
    return {
        "seconds": middle,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "prompt_tokens": runs[0]["prompt_tokens"],
        "output_tokens": runs[0]["output_tokens"],
        "prompt_tokens_per_second": runs[0]["prompt_tokens"] / middle,
        "output_tokens_per_second": runs[0]["output_tokens"] / middle,
        "median_first_token_seconds": statistics.median(first) if first else None,
    }


def machine() -> dict[str, Any]:
    import torch
    import triton
    import vllm

    import rapidkda

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm.__version__,
        "rapidkda": rapidkda.__version__,
        "rev": os.environ.get("RAPIDKDA_REVISION", ""),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def record(settings: Settings, count: int, rounds: int, control: bool, out: Path) -> dict[str, Any]:
    """Run everything; the file is written after each part, so an interrupted run keeps what it had."""
    found: dict[str, Any] = {"settings": asdict(settings), "engines": {}, "tokens": {}, "first_token": [], "batch": {}}

    def keep() -> None:
        out.write_text(json.dumps(found, indent=1))

    answers: dict[str, list[dict[str, Any]]] = {}
    longest = settings.max_length - settings.max_tokens
    lengths = spread(count, 100, min(8000, longest))
    with servers(settings, control) as started:
        found["meta"] = machine()
        for side, server in started.items():
            found["engines"][side] = {"chunk": server.chunk, **server.answer()}
        keep()
        if not found["engines"]["on"]["plans"] or found["engines"]["off"]["plans"]:
            raise RuntimeError(f"rapidkda must serve the engine 'on' and no other, got {found['engines']}")
        texts = prompts(lengths, seed=1)
        found["lengths"] = lengths
        sides = ("off", "on")
        for side in sides:
            answers[side] = started[side].ask("compare", texts, settings.max_tokens)
        found["tokens"]["on"] = compare(answers["off"], answers["on"])
        keep()
        for length in [length for length in SINGLE_LENGTHS if length <= longest]:
            runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
            for turn in range(rounds + 1):  # the first turn compiles what the length needs
                for side in sides if turn % 2 else sides[::-1]:
                    runs[side].append(started[side].ask("time", prompts([length], seed=2 + turn), 1))
            found["first_token"].append(
                {"prompt_tokens": length, **{side: median_times(runs[side][1:]) for side in sides}}
            )
            keep()
        runs = {side: [] for side in sides}
        for turn in range(rounds):  # the comparison was their warm-up
            for side in sides if turn % 2 else sides[::-1]:
                runs[side].append(started[side].ask("time", texts, settings.max_tokens))
            found["batch"] = {side: median_times(runs[side]) for side in sides}
            keep()
        if control:
            answers["control"] = started["control"].ask("compare", texts, settings.max_tokens)
            found["tokens"]["control"] = compare(answers["off"], answers["control"])
    if recalls(Path(settings.model)):
        found["known"] = {side: known(texts, answer) for side, answer in answers.items()}
    keep()
    return found


def _spread(times: dict[str, Any], scale: float, digits: int) -> str:
    """The median of some runs, and their range."""
    middle, low, high = (f"{scale * times[name]:.{digits}f}" for name in ("seconds", "seconds_min", "seconds_max"))
    return f"{middle} ({low} to {high})"


def report(found: dict[str, Any]) -> str:
    """A record as text for a page."""
    settings, tokens = found["settings"], found["tokens"]
    lines = ["| | off: vLLM's own prefill | on: rapidkda's |", "| --- | --- | --- |"]
    for row in found["first_token"]:
        cells = (_spread(row[side], 1e3, 1) for side in ("off", "on"))
        lines.append(f"| first token of a prompt of {row['prompt_tokens']} tokens, ms | {' | '.join(cells)} |")
    batch = found["batch"]
    count, output = len(found["lengths"]), settings["max_tokens"]
    cells = (_spread(batch[side], 1.0, 2) for side in ("off", "on"))
    lines.append(f"| {count} prompts at once, {output} tokens each, s | {' | '.join(cells)} |")
    for text, name, scale in (
        ("prompt tokens a second", "prompt_tokens_per_second", 1.0),
        ("median time to the first token, ms", "median_first_token_seconds", 1e3),
    ):
        cells = (f"{scale * batch[side][name]:.0f}" for side in ("off", "on"))
        lines.append(f"| {text} | {' | '.join(cells)} |")
    lines.append("")
    for side, name in (("on", "On against off"), ("control", "Off with another chunk size against off")):
        if side in tokens:
            part = tokens[side]
            parted = f"; where they part, the gap is at most {part['largest_gap']:.3f}" if part["parted"] else ""
            lines.append(
                f"- {name}: {part['identical']} of {part['prompts']} prompts with identical tokens{parted}. "
                f"Log-probabilities of the best {CANDIDATES} candidates differ by "
                f"{part['logprob_difference_mean']:.4f} on average, {part['logprob_difference_max']:.3f} at most."
            )
    for side, counts in found.get("known", {}).items():
        lines.append(f"- {side}: {counts['right']} of {counts['prompts']} continuations known beforehand are right.")
    meta = found["meta"]
    lines += [
        "",
        f"{meta['gpu']}, vLLM {meta['vllm']}, torch {meta['torch']}, triton {meta['triton']}, rapidkda "
        f"{meta['rapidkda']} ({meta['rev']}), {meta['date']}; prompts of {min(found['lengths'])} to "
        f"{max(found['lengths'])} tokens, steps of at most {settings['chunk']} tokens, "
        f"{'CUDA graphs for decode steps' if settings['graphs'] else 'no CUDA graphs'}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="result file, JSON")
    parser.add_argument("--model", help="checkpoint folder; without it one is made with random weights")
    parser.add_argument("--layers", type=int, default=8, help="layers of the checkpoint that is made")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-gib", type=float, default=8.0)
    parser.add_argument("--attention", default="", help="vLLM's attention backend, e.g. TRITON_MLA")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs for decode steps")
    parser.add_argument("--no-control", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model
        if model is None:
            model = scratch
            write(Path(scratch), Sizes(layers=arguments.layers), seed=0)
        settings = Settings(
            model=model,
            chunk=arguments.chunk,
            max_tokens=arguments.max_tokens,
            max_length=arguments.max_length,
            cache_gib=arguments.cache_gib,
            attention=arguments.attention,
            graphs=arguments.graphs,
        )
        found = record(settings, arguments.prompts, arguments.rounds, not arguments.no_control, arguments.out)
    print(report(found))


if __name__ == "__main__":
    main()
