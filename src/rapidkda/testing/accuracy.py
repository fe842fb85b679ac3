"""One accuracy check an operator: run a backend through the front door, compare with float64, return the worst errors.

Every check poisons what must be written (outputs, free pool rows) with NaN and permutes the slots, so that an
unwritten row or a wrong slot shows as an infinite error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .. import ops, reference
from ..problem import Op, Rollback
from ..segments import Segments
from .inputs import Inputs, make_inputs
from .regimes import Regime
from .regimes import regime as regime_by_name
from .shapes import Shape
from .tolerances import Bar, bar, case_bar, relative_error, worst_output_error, worst_state_error


@dataclass(frozen=True)
class Check:
    """The outcome of one check: worst relative errors over sequences and heads, and the bars they must meet."""

    op: Op
    form: str  # which form of the operator, empty for the only one
    shape: str
    regime: str
    dtype: torch.dtype
    err_out: float
    err_state: float | None
    limit: Bar

    @property
    def passed(self) -> bool:
        return self.err_out <= self.limit.out and (self.err_state is None or self.err_state <= self.limit.state)


def pool_of(states: Tensor, seed: int, spare: int = 3) -> tuple[Tensor, Tensor]:
    """A pool [N + spare, ...] that holds the states in permuted rows, NaN in the free ones, and the slots int32 [N]."""
    count = states.shape[0]
    order = torch.randperm(count + spare, generator=torch.Generator().manual_seed(seed))[:count].to(states.device)
    pool = torch.full((count + spare, *states.shape[1:]), float("nan"), device=states.device)
    pool[order] = states
    return pool, order.to(torch.int32)


def check_prefill(
    shape: Shape, regime: str | Regime, dtype: torch.dtype, device: torch.device, backend: str, seed: int
) -> Check:
    """Segments with gaps between them, strided inputs, every second one continued from its state."""
    inputs = make_inputs(shape, regime, dtype=dtype, device=device, seed=seed, layout="fused", gaps=True)
    continued = torch.arange(len(shape.seq_lens), device=device) % 2 == 0
    starts = inputs.states * continued[:, None, None, None]
    pool, slots = pool_of(inputs.states, seed)
    out = torch.full(inputs.v.shape, float("nan"), dtype=dtype, device=device)
    ops.prefill(
        *inputs.operands(),
        **inputs.options(),
        segments=inputs.segments,
        state=pool,
        slots=slots,
        has_initial_state=continued,
        out=out,
        backend=backend,
    )
    want, final = inputs.expected(states=starts)
    return _judge("prefill", "", shape, regime, dtype, inputs, out, want, pool[slots.long()], final)


def check_decode(
    shape: Shape, regime: str | Regime, dtype: torch.dtype, device: torch.device, backend: str, seed: int
) -> Check:
    """One token for each request of the shape."""
    batch = replace(shape, seq_lens=(1,) * len(shape.seq_lens))
    inputs = make_inputs(batch, regime, dtype=dtype, device=device, seed=seed, layout="fused")
    pool, slots = pool_of(inputs.states, seed)
    out = torch.full(inputs.v.shape, float("nan"), dtype=dtype, device=device)
    ops.decode(*inputs.operands(), **inputs.options(), state=pool, slots=slots, out=out, backend=backend)
    want, final = inputs.expected()
    return _judge("decode", "", shape, regime, dtype, inputs, out, want, pool[slots.long()], final)


def check_verify(
    shape: Shape,
    regime: str | Regime,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    seed: int,
    rollback: Rollback,
    deferred: bool = False,
) -> Check:
    """Two verify steps; the second starts from the tokens of the first that were accepted, 1 to 1 + k of each. Some of
    the deferred states are stored by the second."""
    count, most = len(shape.seq_lens), 4
    batch = replace(shape, seq_lens=tuple(1 + n % most for n in range(count)))
    first, second = (
        make_inputs(batch, regime, dtype=dtype, device=device, seed=seed + i, layout="fused") for i in range(2)
    )
    accepted = [1 + (n * 7 + seed) % length for n, length in enumerate(batch.seq_lens)]
    starts = [start for start, _ in first.spans]
    _, after = replace(first, segments=Segments.from_lengths(accepted, device, starts)).expected()
    if rollback == "replay":
        pool, slots = pool_of(first.states, seed)
        width = 2 * shape.key_dim + shape.value_dim
        held_rows = most + 2 if deferred else most
        records = torch.full((pool.shape[0], held_rows, shape.hv, width), float("nan"), device=device)
    else:
        table = torch.full((count, most, *first.states.shape[1:]), float("nan"), device=device)
        table[:, 0] = first.states
        pool, rows = pool_of(table.flatten(0, 1), seed)
        slots, records = rows.view(count, most), None
    held = torch.full((pool.shape[0], shape.hv), 1, dtype=torch.int32, device=device) if deferred else None
    none = torch.zeros(count, dtype=torch.int32, device=device)
    out = torch.full(second.v.shape, float("nan"), dtype=dtype, device=device)
    for inputs, taken in ((first, none), (second, torch.tensor(accepted, dtype=torch.int32, device=device))):
        out.fill_(float("nan"))
        ops.verify(
            *inputs.operands(),
            **inputs.options(),  # each step has gate parameters of its own: what is replayed must not depend on them
            segments=inputs.segments,
            state=pool,
            slots=slots,
            accepted=taken,
            records=records,
            held=held,
            out=out,
            backend=backend,
        )
    want, final = second.expected(states=after)
    lengths = torch.tensor(batch.seq_lens, device=device)
    if records is not None:
        ops.commit(state=pool, records=records, held=held, slots=slots, accepted=lengths.int(), backend=backend)
        got = pool[slots.long()]
    else:
        got = pool[slots[torch.arange(count, device=device), lengths - 1].long()]
    return _judge("verify", "deferred" if deferred else rollback, shape, regime, dtype, second, out, want, got, final)


def check_conv(shape: Shape, dtype: torch.dtype, device: torch.device, backend: str, seed: int) -> Check:
    """Convolution of width 4 with history over the shape's segments, q, k and v channels side by side."""
    generator = torch.Generator(device).manual_seed(seed)
    channels = 2 * shape.heads * shape.key_dim + shape.hv * shape.value_dim
    x = torch.randn(shape.tokens, channels, generator=generator, device=device).to(dtype)
    weight = torch.randn(channels, 4, generator=generator, device=device) / 2
    history = torch.randn(len(shape.seq_lens), channels, 3, generator=generator, device=device)
    pool, slots = pool_of(history, seed)
    segments = Segments.from_lengths(shape.seq_lens, device)
    out = torch.full_like(x, float("nan"))
    ops.causal_conv(x, weight, segments=segments, state=pool, slots=slots, out=out, backend=backend)
    want = torch.zeros(x.shape, dtype=torch.float64)
    final = torch.zeros(history.shape, dtype=torch.float64)
    begin = 0
    for n, length in enumerate(shape.seq_lens):
        rows = slice(begin, begin + length)
        want[rows], last = reference.causal_conv(x[rows].cpu(), weight.cpu(), None, history[n].T.cpu())
        final[n], begin = last.T, begin + length
    errors = relative_error(out, want), relative_error(pool[slots.long()], final)
    return Check("conv", "", shape.name, "", dtype, *errors, case_bar(dtype))


def check_norm(shape: Shape, dtype: torch.dtype, device: torch.device, backend: str, seed: int) -> Check:
    """Gated RMSNorm of the shape's outputs."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.tokens, shape.hv, shape.value_dim)
    x, z = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(2))
    weight = torch.rand(shape.value_dim, generator=generator, device=device) + 0.5
    out = ops.gated_rms_norm(x, z, weight, out=torch.full_like(x, float("nan")), backend=backend)
    want = reference.gated_rms_norm(x.cpu(), z.cpu(), weight.cpu(), 1e-5)
    return Check("norm", "", shape.name, "", dtype, relative_error(out, want), None, case_bar(dtype))


KdaCheck = Callable[[Shape, str | Regime, torch.dtype, torch.device, str, int], Check]


def kda_check(op: Op, rollback: Rollback = "replay", deferred: bool = False) -> KdaCheck:
    """The check of a KDA operator; `rollback` and `deferred` are verify's."""
    if op == "prefill":
        return check_prefill
    if op == "decode":
        return check_decode
    return partial(check_verify, rollback=rollback, deferred=deferred)


def _judge(
    op: Op,
    form: str,
    shape: Shape,
    regime: str | Regime,
    dtype: torch.dtype,
    inputs: Inputs,
    out: Tensor,
    want: Tensor,
    state: Tensor,
    final: Tensor,
) -> Check:
    err_out = worst_output_error(out, want, inputs.spans)
    err_state = worst_state_error(state, final)
    name = regime_by_name(regime).name
    return Check(op, form, shape.name, name, dtype, err_out, err_state, bar(name, dtype))
