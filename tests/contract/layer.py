"""A prefill with its neighbours, the convolution before it and the gated norm after it, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rapidkda import Checkpoints, Segments, ops, reference
from rapidkda.testing import regime, relative_error

from .cases import case
from .convolution import Windows
from .graphs import gpu_only
from .guards import GuardedPool, all_zero, fail, same_bits, some_slots, within
from .target import Target

HEADS, DIM, WIDTH = 16, 128, 4
LENS = (100, 1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 0, 1, 20, 1, 3, 48, 64, 19)  # chains enough to fill a device


class Layer:
    """A step's projections as slices of one buffer, with a row of another request after each segment, and pools."""

    def __init__(
        self,
        target: Target,
        lens: Sequence[int] = LENS,
        gates: str = "slow",
        *,
        channels_last: bool = True,
        fresh: Sequence[int] = (),
        extra: int = 0,
        gate_dtype: torch.dtype | None = None,
        padding: int = 0,
    ):
        self.target, self.lens, self.fresh = target, list(lens), fresh
        self.first = [sum(lens[:n]) + n + 2 for n in range(len(lens))]
        count, width = self.first[-1] + lens[-1] + 3, HEADS * DIM
        self.kind = regime(gates)
        rows = torch.cat([torch.arange(f, f + n) for f, n in zip(self.first, lens, strict=True)]).to(target.device)
        buffer = torch.full((count, 5 * width + HEADS + padding), float("nan"), device=target.device)
        raw = self.kind.generate(_shape(lens), target.generator(3))
        z = target.normal(len(rows), width, seed=4, dtype=torch.float32)
        parts = [raw.q.flatten(1), raw.k.flatten(1), raw.v.flatten(1), raw.g.flatten(1), z, raw.beta]
        buffer[rows, : 5 * width + HEADS] = torch.cat(parts, 1)
        pieces = buffer.to(target.dtype).split([3 * width, width, width, HEADS, padding], 1)
        self.x, self.beta = pieces[0], pieces[3]
        self.g, self.z = (piece.unflatten(1, (HEADS, DIM)) for piece in pieces[1:3])
        if gate_dtype is not None:
            self.g = self.g.to(gate_dtype)
        self.A_log, self.dt_bias = raw.A_log, raw.dt_bias
        self.conv_weight = 0.5 * target.normal(3 * width, WIDTH, seed=5, dtype=torch.float32)
        self.norm_weight = target.normal(DIM, seed=6, dtype=torch.float32)
        self.segments = Segments.from_lengths(self.lens, target.device, self.first)
        self.slots = some_slots(len(lens))
        self.table = target.index(self.slots)
        self.old = target.index([n not in fresh for n in range(len(lens))], torch.bool)
        size = max(self.slots) + 3
        self.states = GuardedPool(target, size, (HEADS, DIM, DIM), poison=True)
        self.windows = Windows(
            target, size, WIDTH - 1 + extra, channels_last, target.dtype, poison=True, channels=3 * width
        )
        for n, slot in enumerate(self.slots):
            if n not in fresh:
                self.states.view[slot] = 0.1 * target.normal(HEADS, DIM, DIM, seed=50 + n, dtype=torch.float32)
                self.windows.put_window(slot, target.normal(WIDTH - 1 + extra, 3 * width, seed=200 + n))
        self.states.before = self.states.storage.clone()
        self.old_states = self.states.view.clone()
        self.old_windows = [self.windows.window(slot).clone() for slot in range(size)]
        self.out = torch.full((count, HEADS, 2 * DIM), float("nan"), dtype=target.dtype, device=target.device)
        self.channels_last = channels_last

    def run(self, convolves: bool = True, norms: bool = True, x: Tensor | None = None, **options: Any) -> Tensor:
        arguments: dict[str, Any] = {
            "segments": self.segments,
            "state": self.states.view,
            "slots": self.table,
            "has_initial_state": self.old,
            "out": self.out[..., :DIM],
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "lower_bound": self.kind.lower_bound,
            "backend": self.target.name,
        }
        if convolves:
            arguments |= {
                "conv_weight": self.conv_weight,
                "conv_state": self.windows.view,
                "channels_last": self.channels_last,
            }
        if norms:
            arguments |= {"z": self.z, "norm_weight": self.norm_weight}
        return ops.prefill_layer(self.x if x is None else x, self.g, self.beta, **(arguments | options))

    def check(
        self,
        convolves: bool = True,
        norms: bool = True,
        activation: str = "sigmoid",
        offsets: Sequence[int] | None = None,
        heads: Sequence[int] = (0, HEADS - 1),
    ) -> None:
        """Outputs, states and windows of every segment against float64; nothing else was written."""
        bar = self.target.case_bar()
        covered = torch.zeros(self.out.shape[0], dtype=torch.bool)
        for n, (first, count, slot) in enumerate(zip(self.first, self.lens, self.slots, strict=True)):
            covered[first : first + count] = True
            rows = slice(first, first + count)
            start = 0 if offsets is None else offsets[n]
            history = self.old_windows[slot][start : start + WIDTH - 1]
            history = torch.zeros_like(history) if n in self.fresh else history
            x = self.x[rows].cpu()
            mixed, window = x.double(), history.cpu().double()
            if convolves:
                mixed, window = reference.causal_conv(x, self.conv_weight.cpu(), history=history.cpu())
                same_bits(f"window {n}", self.windows.window(slot)[: WIDTH - 1].cpu(), window.to(self.x.dtype))
            q, k, v = (part.unflatten(1, (HEADS, DIM))[:, list(heads)] for part in mixed.chunk(3, 1))
            chosen = list(heads)
            gate = (self.A_log.cpu()[chosen], self.dt_bias.cpu()[chosen], self.kind.lower_bound)
            old = self.old_states[slot][chosen].cpu().transpose(-1, -2)
            old = torch.zeros_like(old) if n in self.fresh else old
            out, state = reference.recurrence(
                reference.l2_normalize(q),
                reference.l2_normalize(k),
                v,
                reference.gate_log_decay(self.g[rows][:, chosen].cpu(), *gate),
                self.beta[rows][:, chosen].cpu().double().sigmoid(),
                DIM**-0.5,
                old,
            )
            if norms:
                z = self.z[rows][:, chosen].cpu()
                out = reference.gated_rms_norm(out, z, self.norm_weight.cpu(), 1e-5, activation)
            within(f"outputs {n}", relative_error(self.out[rows, chosen, :DIM].cpu(), out), bar.out)
            got = self.states.view[slot][chosen].cpu()
            within(f"state {n}", relative_error(got, state.transpose(-1, -2)), bar.state)
        if not bool(torch.isnan(self.out[~covered]).all() and torch.isnan(self.out[..., DIM:]).all()):
            fail("rows of no segment, or memory beside the output slice, were written")
        self.states.unchanged(self.slots)
        self.windows.unchanged(self.slots if convolves else ())


def _shape(lens: Sequence[int]) -> Any:
    from rapidkda.testing.shapes import Shape

    return Shape("layer", tuple(lens), HEADS, None, DIM, DIM)


@case(
    "B86",
    slow_when_interpreted=True,
    gates=("fast", "slow", "unbounded"),
    neighbours=("conv", "norm", "conv norm", "none"),
)
def layer_of_every_length(target: Target, gates: str, neighbours: str) -> None:
    """Segments of 0, 1 and more tokens, with and without an old state, between rows of other requests."""
    layer = Layer(target, gates=gates, fresh=(0, 4, 12, 16))
    which = {"convolves": "conv" in neighbours, "norms": "norm" in neighbours}
    layer.run(**which)
    layer.check(**which)


@case("B86", slow_when_interpreted=True, fresh=((), (0, 3)))
def layer_without_tokens(target: Target, fresh: tuple[int, ...]) -> None:
    """Empty segments alone: states and windows pass through, or become zero."""
    layer = Layer(target, [0] * 20, fresh=fresh)
    layer.first = [0] * 20
    layer.segments = Segments.from_lengths(layer.lens, target.device)
    layer.x, layer.g, layer.beta, layer.z, layer.out = (
        x[:0] for x in (layer.x, layer.g, layer.beta, layer.z, layer.out)
    )
    layer.run()
    layer.check()


@case("B86", slow_when_interpreted=True, lens=((70, 33, 1), (400,)))
def layer_of_few_chains(target: Target, lens: tuple[int, ...]) -> None:
    """Too few to fill a device with."""
    layer = Layer(target, lens, fresh=(1,))
    layer.run()
    layer.check()


@case("B86", slow_when_interpreted=True, channels_last=(True, False), extra=(0, 3))
def histories_in_either_layout(target: Target, channels_last: bool, extra: int) -> None:
    """Channels first and last; windows longer than the taps, where a history starts behind accepted drafts."""
    layer = Layer(target, channels_last=channels_last, extra=extra, fresh=(3,))
    accepted = [n % (extra + 3) for n in range(len(LENS))] if extra else None
    offsets = None if accepted is None else [min(max(a, 1), extra + 1) - 1 for a in accepted]
    layer.run(accepted=None if accepted is None else target.index(accepted))
    layer.check(offsets=offsets)


@case(
    "B86", slow_when_interpreted=True, activation=("sigmoid", "silu"), gate_dtype=(torch.float32, None), padding=(0, 3)
)
def gates_and_strides(target: Target, activation: str, gate_dtype: torch.dtype | None, padding: int) -> None:
    """Both activations of the norm, g in float32, rows at any multiple of an element."""
    layer = Layer(target, gate_dtype=gate_dtype, padding=padding)
    layer.run(norm_activation=activation)
    layer.check(activation=activation)


@case("B86", slow_when_interpreted=True, fuse=(True, False))
def padding_rows_of_a_layer(target: Target, fuse: bool) -> None:
    """A segment without a slot leaves zeros and touches no pool, whatever a step before left in its rows."""
    layer = Layer(target)
    slots = list(layer.slots)
    slots[2] = slots[9] = -1
    for n in (2, 9):
        for x in (layer.x, layer.g, layer.beta, layer.z):
            x[layer.first[n] : layer.first[n] + LENS[n]] = float("nan")
    layer.run(slots=target.index(slots), fuse=fuse)
    for n in (2, 9):
        all_zero(f"outputs of padding {n}", layer.out[layer.first[n] : layer.first[n] + LENS[n], :, :DIM])
    layer.states.unchanged([slot for slot in slots if slot >= 0])
    layer.windows.unchanged([slot for slot in slots if slot >= 0])


@case("B86", slow_when_interpreted=True)
def other_slots_are_read(target: Target) -> None:
    """A request may start from a slot that it leaves alone."""
    layer, want = Layer(target), Layer(target)
    spare = max(layer.slots) + 1
    for pool in (layer.states, layer.windows):
        pool.view[spare] = pool.view[layer.slots[0]]
        pool.view[layer.slots[0]] = float("nan")
        pool.before = pool.storage.clone()
    read = target.index([spare, *layer.slots[1:]])
    layer.run(read_slots=read, conv_read_slots=read)
    want.run()
    same_bits("outputs", layer.out, want.out)
    for slot in layer.slots:
        same_bits("state", layer.states.view[slot], want.states.view[slot])
        same_bits("window", layer.windows.window(slot), want.windows.window(slot)) if slot != layer.slots[0] else None
    layer.states.unchanged(layer.slots)
    layer.windows.unchanged(layer.slots)


@case("B86", slow_when_interpreted=True)
def checkpoints_of_a_layer(target: Target) -> None:
    """States and histories at token offsets: those of a request that ended there."""
    layer = Layer(target, extra=2)
    free = [slot for slot in range(layer.states.view.shape[0]) if slot not in layer.slots][:2]
    layer.run(
        checkpoints=Checkpoints.build([(0, 48, free[0]), (18, 64, free[1])], len(LENS), target.device),
        checkpoint_pool=layer.states.view,
        conv_checkpoint_pool=layer.windows.view,
    )
    short = Layer(target, extra=2)
    lens = [48 if n == 0 else count for n, count in enumerate(LENS)]
    short.run(segments=Segments.from_lengths(lens, target.device, short.first))
    same_bits("state", layer.states.view[free[0]], short.states.view[short.slots[0]])
    for slot, source in ((free[0], short.slots[0]), (free[1], layer.slots[18])):
        want = (short if slot == free[0] else layer).windows.window(source)[: WIDTH - 1]
        same_bits("window", layer.windows.window(slot)[: WIDTH - 1], want)


@case("B86", slow_when_interpreted=True)
def checkpoints_without_pools(target: Target) -> None:
    """Nothing but what is exported outlives the call: states and histories all the same."""
    layer, short = Layer(target, fresh=range(len(LENS))), Layer(target, fresh=range(len(LENS)))
    begins = {"state": None, "slots": None, "has_initial_state": None, "conv_state": None}
    entries = [(0, 48, 0), (0, 96, 3), (18, 64, 2)]
    layer.run(
        checkpoints=Checkpoints.build(entries, len(LENS), target.device),
        checkpoint_pool=layer.states.view,
        conv_checkpoint_pool=layer.windows.view,
        **begins,
    )
    for n, at, row in entries:
        lens = [at if i == n else count for i, count in enumerate(LENS)]
        short.run(segments=Segments.from_lengths(lens, target.device, short.first))
        same_bits(f"state of {n} after {at}", layer.states.view[row], short.states.view[short.slots[n]])
        end = layer.first[n] + at
        same_bits(f"window of {n} after {at}", layer.windows.window(row)[: WIDTH - 1], layer.x[end - WIDTH + 1 : end])
    rows = [row for *_, row in entries]
    layer.states.unchanged(rows)
    layer.windows.unchanged(rows)


@case("B86", slow_when_interpreted=True)
def fused_or_not(target: Target) -> None:
    """What a backend takes on changes nothing but rounding."""
    one, two = Layer(target), Layer(target)
    one.run()
    two.run(fuse=False)
    for n, (first, count) in enumerate(zip(one.first, LENS, strict=True)):
        rows = slice(first, first + count)
        within(f"outputs {n}", relative_error(one.out[rows, :, :DIM], two.out[rows, :, :DIM]), target.case_bar().out)


@case("B86", slow_when_interpreted=True)
def refilled_graph_of_a_layer(target: Target) -> None:
    """A captured call follows its buffers."""
    gpu_only(target)
    eager, replayed = Layer(target), Layer(target)
    for layer in (eager, replayed):
        layer.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.run()
    for step in range(4):
        for layer in (eager, replayed):
            layer.x.copy_(layer.x.roll(step, 1))
            layer.table.copy_(layer.table.roll(1))
            if step == 2:
                layer.table[3] = -1
        eager.run()
        graph.replay()
        same_bits(f"outputs of step {step}", replayed.out, eager.out)
        same_bits(f"states of step {step}", replayed.states.storage, eager.states.storage)
        same_bits(f"windows of step {step}", replayed.windows.storage, eager.windows.storage)
