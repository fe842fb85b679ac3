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
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kimi_linear_checkpoint import Sizes, continuation, recalls, write

CANDIDATES = 8  # log-probabilities kept a token
SINGLE_LENGTHS = (100, 1000, 4000, 8000)


@dataclass(frozen=True)
class Settings:
    """What every engine of a run shares.

    Attributes:
        chunk: most tokens of one step; longer prompts are prefilled in chunks, beside the decodes of others.
        cache_gib: memory of the KV and state caches of each engine.
        attention: backend of the latent attention; empty for vLLM's choice.
        graphs: CUDA graphs for pure decode steps.
    """

    model: str
    chunk: int
    max_tokens: int
    max_length: int
    cache_gib: float
    attention: str
    graphs: bool


def engine(settings: Settings, chunk: int) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    if not settings.graphs:
        options = {"enforce_eager": True}
    if settings.attention:
        options["attention_backend"] = settings.attention
    return LLM(
        model=settings.model,
        max_model_len=settings.max_length,
        max_num_batched_tokens=chunk,
        max_num_seqs=64,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=int(settings.cache_gib * 2**30),
        gpu_memory_utilization=0.3,  # three engines share the GPU
        max_logprobs=CANDIDATES,
        disable_log_stats=False,
        seed=0,
        **options,
    )


def plans(model: Any) -> list[str]:
    """What rapidkda decided for each layer that it serves: empty when it is not active."""
    return [str(module._rapidkda_plan) for module in model.modules() if hasattr(module, "_rapidkda_plan")]


def compare_run(llm: Any, prompts: list[str], max_tokens: int) -> list[dict[str, Any]]:
    """Greedy tokens of all prompts at once, with the log-probabilities of the best candidates of every step."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=CANDIDATES)
    found = []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        best = output.outputs[0]
        steps = [{token: entry.logprob for token, entry in step.items()} for step in best.logprobs]
        found.append({"prompt": len(output.prompt_token_ids), "tokens": list(best.token_ids), "steps": steps})
    return found


def timed_run(llm: Any, prompts: list[str], max_tokens: int) -> dict[str, Any]:
    """Wall time of a batch in seconds, its token counts, and each request's time to first token where vLLM tells it."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    first = [output.metrics.first_token_latency for output in outputs if output.metrics is not None]
    return {
        "seconds": seconds,
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "first_token_seconds": first,
    }


def compile_in_parallel() -> None:
    """Let triton compile all candidates of an autotuned kernel at once, and keep what it chose on disk.

    vLLM's KDA kernels have over a hundred candidates, which triton compiles one after another when a first request
    comes, in every process. The candidates and how they are timed stay the same.
    """
    from concurrent.futures import ThreadPoolExecutor

    import triton
    from triton.runtime.autotuner import Autotuner

    prune, look_up = Autotuner.prune_configs, Autotuner.check_disk_cache

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> Any:
        self.call = {name: value for name, value in kwargs.items() if name != "warmup"}
        return prune(self, kwargs)

    def check_disk_cache(self: Any, key: Any, configs: Any, benchmark: Any) -> Any:
        def compile_and_benchmark() -> None:
            with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
                for config in configs:
                    self.fn.warmup(*self.nargs.values(), **self.call, **config.all_kwargs())
            benchmark()

        return look_up(self, key, configs, compile_and_benchmark)

    Autotuner.prune_configs = prune_configs
    Autotuner.check_disk_cache = check_disk_cache


def serve(connection: Connection, side: str, settings: Settings, chunk: int) -> None:
    """A process with one engine that runs what it is told: (name of a function above, arguments)."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
    os.environ.pop("RAPIDKDA_VLLM", None)
    if side == "on":
        os.environ["RAPIDKDA_VLLM"] = "prefill"
    try:
        begin = time.perf_counter()
        compile_in_parallel()
        llm = engine(settings, chunk)
        connection.send({"plans": llm.apply_model(plans)[0], "seconds": time.perf_counter() - begin})
        commands = {"compare": compare_run, "time": timed_run}
        while (order := connection.recv()) is not None:
            connection.send(commands[order[0]](llm, *order[1:]))
    except BaseException as error:
        connection.send(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        raise


class Server:
    """The parent's end of a `serve` process."""

    def __init__(self, side: str, settings: Settings, chunk: int):
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.side, self.chunk = side, chunk
        self.process = context.Process(target=serve, args=(other, side, settings, chunk), name=side)
        self.process.start()
        other.close()

    def answer(self) -> Any:
        try:
            found = self.connection.recv()
        except EOFError as error:
            raise RuntimeError(f"the engine {self.side!r} died, exit code {self.process.exitcode}") from error
        if isinstance(found, Exception):
            raise RuntimeError(f"the engine {self.side!r} failed: {found!r}") from found
        return found

    def ask(self, *order: Any) -> Any:
        self.connection.send(order)
        return self.answer()


@contextmanager
def servers(settings: Settings, control: bool) -> Iterator[dict[str, Server]]:
    wanted = {"off": settings.chunk, "on": settings.chunk}
    if control:
        wanted["control"] = settings.chunk * 3 // 4
    started = {side: Server(side, settings, chunk) for side, chunk in wanted.items()}
    try:
        yield started
    finally:
        for server in started.values():
            server.process.kill()
            server.process.join()


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
        "rev": os.environ.get("RAPIDKDA_REV", ""),
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


def report(found: dict[str, Any]) -> str:
    """A record as text for a page."""
    settings, tokens = found["settings"], found["tokens"]
    lines = ["| | off: vLLM's own prefill | on: rapidkda's |", "| --- | --- | --- |"]
    for row in found["first_token"]:
        cells = (
            f"{1e3 * row[side]['seconds']:.1f} ({1e3 * row[side]['seconds_min']:.1f} to "
            f"{1e3 * row[side]['seconds_max']:.1f})"
            for side in ("off", "on")
        )
        lines.append(f"| first token of a prompt of {row['prompt_tokens']} tokens, ms | {' | '.join(cells)} |")
    batch = found["batch"]
    count, output = len(found["lengths"]), settings["max_tokens"]
    for text, name, scale in (
        (f"{count} prompts at once, {output} tokens each: seconds", "seconds", 1.0),
        ("prompt tokens a second", "prompt_tokens_per_second", 1.0),
        ("median time to the first token, ms", "median_first_token_seconds", 1e3),
    ):
        cells = (f"{scale * batch[side][name]:.{2 if name == 'seconds' else 0}f}" for side in ("off", "on"))
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
