"""CPU rows: the torch backend against the fallback functions of Hugging Face transformers, in one run.

The peers are `chunk_kimi_delta_attention` and `recurrent_kimi_delta_attention` of transformers' glm5_next model: what
a user without kernels runs. All implementations read the same activated inputs and take turns, so that a machine that
slows down slows all of them.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..reference import gate_log_decay
from ..testing.inputs import Inputs, make_inputs
from ..testing.shapes import Shape, decode_shape
from ..testing.tolerances import bar, worst_output_error, worst_state_error
from .result import Bench, Row

PREFILL = Shape("1x2048_h8", (2048,), 8)
DECODE_BATCH, DECODE_HEADS = 64, 8
OURS, CHUNK, RECURRENT = "torch", "transformers-chunk", "transformers-recurrent"

Run = Callable[[], tuple[Tensor, Tensor]]  # outputs [T, HV, V] and final states [N, HV, V, K]


@dataclass(frozen=True)
class Settings:
    """How long to measure: rounds in which every implementation has its turn, calls of ours in one turn."""

    rounds: int = 5
    calls: int = 5


def rows(bench: Bench, regime: str, settings: Settings, seed: int = 0) -> list[Row]:
    """Measure and check one bench in one regime; RuntimeError when an error is above its bar."""
    shape = PREFILL if bench == "cpu_prefill" else decode_shape(DECODE_BATCH, DECODE_HEADS)
    inputs = _activated(make_inputs(shape, regime, seed=seed))
    runs = _prefill_runs(inputs) if bench == "cpu_prefill" else _decode_runs(inputs)
    heads = [0, shape.heads - 1]
    sequences = list(range(len(shape.seq_lens)))[:: max(1, len(shape.seq_lens) // 8)]
    want, final = inputs.expected(sequences, heads)
    spans = [inputs.spans[n] for n in sequences]
    limit = bar(regime, torch.float32)
    errors = {}
    for impl, run in runs.items():  # also the warm-up
        out, state = run()
        errors[impl] = (
            worst_output_error(out[:, heads], want, spans),
            worst_state_error(state[sequences][:, heads], final),
        )
    if not (errors[OURS][0] <= limit.out and errors[OURS][1] <= limit.state):
        raise RuntimeError(
            f"{bench} {shape.name} {regime}: errors {errors[OURS]} above the bars {limit}; nothing timed"
        )
    times: dict[str, list[float]] = {impl: [] for impl in runs}
    for _ in range(settings.rounds):
        for impl, run in runs.items():
            calls = settings.calls if impl == OURS else 1
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[impl].append((time.perf_counter() - start) / calls * 1e6)
    return [
        Row(
            bench=bench,
            shape=shape.name,
            regime=regime,
            impl=impl,
            us=round(statistics.median(times[impl]), 1),
            us_min=round(min(times[impl]), 1),
            us_max=round(max(times[impl]), 1),
            host_us=None,
            launches=None,
            floor_us=None,
            err_out=errors[impl][0],
            err_state=errors[impl][1],
            note="float32",
        )
        for impl in runs
    ]


def _activated(inputs: Inputs) -> Inputs:
    """The same inputs after the gate and the sigmoid: the transformers functions take no raw ones."""
    inputs.g = gate_log_decay(inputs.g, inputs.A_log, inputs.dt_bias, inputs.lower_bound).float()
    inputs.beta = inputs.beta.float().sigmoid()
    inputs.raw_gate = inputs.raw_beta = False
    inputs.A_log = inputs.dt_bias = inputs.lower_bound = None
    return inputs


def _prefill_runs(inputs: Inputs) -> dict[str, Run]:
    """One sequence from its initial state, in one piece."""
    from transformers.models.glm5_next import modeling_glm5_next as peer

    ours = _ours(inputs, partial(ops.prefill, segments=inputs.segments))
    batch = tuple(x[None] for x in inputs.operands())
    start = inputs.states.transpose(-1, -2).contiguous()
    return {
        OURS: ours,
        CHUNK: partial(_peer, peer.chunk_kimi_delta_attention, batch, start),
        RECURRENT: partial(_peer, peer.recurrent_kimi_delta_attention, batch, start),
    }


def _decode_runs(inputs: Inputs) -> dict[str, Run]:
    """One token for each request."""
    from transformers.models.glm5_next import modeling_glm5_next as peer

    batch = tuple(x[:, None] for x in inputs.operands())
    start = inputs.states.transpose(-1, -2).contiguous()
    return {
        OURS: _ours(inputs, ops.decode),
        RECURRENT: partial(_peer, peer.recurrent_kimi_delta_attention, batch, start),
    }


def _ours(inputs: Inputs, operator: Callable[..., Tensor]) -> Run:
    """The torch backend through the front door, from one half of a pool into the other, so that calls are alike."""
    count = len(inputs.spans)
    pool = torch.cat([inputs.states, torch.full_like(inputs.states, float("nan"))])
    slots = torch.arange(2 * count, dtype=torch.int32)
    out = torch.full_like(inputs.v, float("nan"))

    def run() -> tuple[Tensor, Tensor]:
        operator(
            *inputs.operands(),
            **inputs.options(),
            state=pool,
            read_slots=slots[:count],
            slots=slots[count:],
            out=out,
            backend="torch",
        )
        return out, pool[count:]

    return run


def _peer(function: Any, batch: tuple[Tensor, ...], start: Tensor) -> tuple[Tensor, Tensor]:
    """A transformers fallback on [B, T, ...] tensors, its results in our layouts."""
    fallback = inspect.unwrap(function)  # where kernels are installed, transformers wraps the function with them
    with torch.no_grad():
        out, state = fallback(*batch, initial_state=start, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return out.flatten(0, 1), state.transpose(-1, -2)
