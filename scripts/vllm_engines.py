"""Engines of vLLM, each in a process of its own, that take turns: the ones that `vllm_record` compares."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

CANDIDATES = 8  # log-probabilities kept a token


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
