"""`layer` rows: convolution, KDA and gated norm of one step, against the reference system's sequence of operations.
A backend that fuses them has a row without that beside it.

Both run the same kernels on the same inputs, and both are checked against float64 before they are timed. Ours read the
step's segment tables on the token axis; the other is `layer_sequence`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..backends.base import FusingBackend, Request
from ..device import Device
from ..dispatch import Choice
from ..serving import (
    BackendWish,
    CoreInputs,
    GatedNorm,
    Rollback,
    StepBatch,
    StepLimits,
    StepRequest,
    Workspace,
    run_core,
)
from ..serving.backends import LayerOp, choose
from ..testing.tolerances import relative_error
from .layer_inputs import (
    CPU_STEPS,
    EPS,
    GPU_STEPS,
    Bound,
    Step,
    StepInputs,
    expected,
    fill_pool,
    make_inputs,
    make_pool,
    moved_bytes,
)
from .layer_sequence import reference_sequence
from .result import Row
from .timing import Settings, Times, copy_bandwidth, device_times, host_time, launches

OUT_BARS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 1e-2}  # three roundings more than the operator


def run_layer_bench(
    backend: str,
    *,
    reference: str | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    regimes: Sequence[str] = ("slow",),
    steps: Sequence[Step] | None = None,
    settings: Settings | None = None,
    seed: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Measure one backend: our layer with both forms of rollback, and the reference sequence.

    Args:
        backend: name of a backend of ours that has every operator, or auto: the fastest of each.
        reference: backend of the reference sequence's prefill (flashkda is what the reference system runs); default
            the one of ours.
        device, dtype: where and in what; default bfloat16 on a GPU, float32 on a CPU.
        steps: default a pure and a mixed step fit for the device.
        regimes: gate regimes.
        log: called with a line a row.

    Raises RuntimeError when an output differs from float64 by more than rounding: nothing is reported then.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    settings = settings or Settings()
    bandwidth = copy_bandwidth(device)
    rows = []
    for step in steps or (GPU_STEPS if on_gpu else CPU_STEPS):
        for regime in regimes:
            inputs = make_inputs(step, regime, device, dtype, seed)
            floor = None if bandwidth is None else moved_bytes(inputs) / bandwidth / 1e6
            bounds = _implementations(inputs, backend, reference or backend, dtype)
            errors = {impl: _checked(impl, bound, inputs, regime) for impl, bound in bounds.items()}
            times = _times(bounds, device, settings)
            for impl, bound in bounds.items():
                row = Row(
                    bench="layer",
                    shape=step.name,
                    regime=regime,
                    impl=impl,
                    us=times[impl].us,
                    us_min=times[impl].us_min,
                    us_max=times[impl].us_max,
                    host_us=host_time(bound.call, device),
                    launches=launches(bound.call, device),
                    floor_us=None if floor is None else round(floor, 2),
                    err_out=errors[impl][0],
                    err_state=errors[impl][1],
                    note=f"{str(dtype)[6:]}, convolution, KDA and gated norm",
                )
                log(f"layer {row.shape} {row.regime} {row.impl}: {row.us:.1f} us, {row.launches} launches")
                rows.append(row)
    return rows


def _implementations(inputs: StepInputs, backend: str, reference: str, dtype: torch.dtype) -> dict[str, Bound]:
    request = Request(
        op="prefill",
        device=Device.of(inputs.x.device),
        dtype=dtype,
        key_dim=inputs.step.head_dim,
        value_dim=inputs.step.head_dim,
        gate="softplus" if inputs.lower_bound is None else "bounded",
    )
    ours, theirs = (choose(BackendWish(prefill=prefill, decode=backend), request) for prefill in (backend, reference))
    name = ours["prefill"].name
    bounds = {name: _ours(inputs, ours, "replay")}
    if inputs.step.drafts:
        bounds[f"{name}-slots"] = _ours(inputs, ours, "slots")
    if isinstance(ours["prefill"].backend, FusingBackend):
        bounds[f"{name}-unfused"] = _ours(inputs, ours, "replay", fuse=False)
    bounds[f"{theirs['prefill'].name}-reference-sequence"] = reference_sequence(inputs, theirs)
    return bounds


def _checked(impl: str, bound: Bound, inputs: StepInputs, regime: str) -> tuple[float, float]:
    bound.reset()
    bound.call()
    err_out, err_state = _errors(bound, inputs)
    bound.reset()
    bar = OUT_BARS[inputs.x.dtype]
    if not (err_out <= bar and err_state <= bar):
        name = f"layer {inputs.step.name} {regime} {impl}"
        raise RuntimeError(f"{name}: errors {err_out:.1e}, {err_state:.1e} above {bar}; nothing timed")
    return err_out, err_state


def _times(bounds: Mapping[str, Bound], device: torch.device, settings: Settings) -> dict[str, Times]:
    """On a CPU the implementations take turns, so that a machine that slows down slows all of them."""
    if device.type == "cuda":
        return {impl: device_times([bound.call], device, settings)[0] for impl, bound in bounds.items()}
    samples: dict[str, list[float]] = {impl: [] for impl in bounds}
    for _ in range(settings.rounds):
        for impl, bound in bounds.items():
            samples[impl].append(device_times([bound.call], device, Settings(rounds=1))[0].us)
    return {impl: Times.of(taken) for impl, taken in samples.items()}


def _ours(inputs: StepInputs, choices: Mapping[LayerOp, Choice], rollback: Rollback, fuse: bool = True) -> Bound:
    step, device = inputs.step, inputs.x.device
    pool, slots = make_pool(inputs, rollback)
    limits = StepLimits(step.tokens, len(step.requests))
    workspace = Workspace(pool.shape, limits, choices["prefill"], dtype=inputs.x.dtype, device=device)
    pool.slots = None  # the slots are shuffled, so the pool's books do not apply
    batch = StepBatch(pool, limits)
    batch.fill(
        [StepRequest(index, kind, tokens, own) for index, ((kind, tokens), own) in enumerate(zip(step.requests, slots))]
    )
    out = workspace.core_output(step.tokens)
    core = CoreInputs(
        x=inputs.x,
        g=inputs.g,
        beta=inputs.beta,
        conv_weight=inputs.conv_weight,
        gate=inputs.gate,
        conv_out=workspace.conv_output(step.tokens),
        out=out,
        scratch=workspace.scratch(),
        norm=GatedNorm(inputs.z, inputs.norm_weight, EPS),
        fuse=fuse,
    )

    def call() -> None:
        run_core(core, batch, pool, pool.layers[0], choices)

    def reset() -> None:
        workspace.fill(255)
        fill_pool(pool, slots, inputs)

    return Bound(call, out, reset, lambda index: pool.layers[0].recurrent[slots[index][0]])


def _errors(bound: Bound, inputs: StepInputs) -> tuple[float, float]:
    """Worst relative errors against float64 over the first request of each kind and two heads.

    States are judged for the kinds that leave a settled one.
    """
    step = inputs.step
    kinds = [kind for kind, _ in step.requests]
    worst_out = worst_state = 0.0
    for kind in sorted(set(kinds)):
        index = kinds.index(kind)
        start = sum(tokens for _, tokens in step.requests[:index])
        span = slice(start, start + step.requests[index][1])
        for head in {0, step.heads - 1}:
            wanted, state = expected(inputs, index, span, head)
            worst_out = max(worst_out, relative_error(bound.out[span, head].cpu(), wanted))
            if kind != "verify":
                worst_state = max(worst_state, relative_error(bound.state_of(index)[head].cpu(), state))
    return worst_out, worst_state
