"""The causal convolution and its history windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rapidkda import Checkpoints, Segments, reference
from rapidkda.testing import relative_error

from .cases import case
from .guards import GuardedPool, all_zero, fail, same_bits, some_slots, within
from .target import Target

CHANNELS = 96


class Windows(GuardedPool):
    """A pool of histories, read and written [L, C] whatever its layout is."""

    def __init__(
        self,
        target: Target,
        rows: int,
        length: int,
        channels_last: bool,
        dtype: torch.dtype,
        poison: bool = False,
        channels: int = CHANNELS,
    ):
        inner = (length, channels) if channels_last else (channels, length)
        super().__init__(target, rows, inner, dtype, poison)
        self.channels_last = channels_last

    def put_window(self, slot: int, window: Tensor) -> None:
        """Entries 0 .. len(window) - 1."""
        view = self.view[slot] if self.channels_last else self.view[slot].t()
        view[: window.shape[0]] = window.to(view)
        self.before = self.storage.clone()

    def window(self, slot: int) -> Tensor:
        return self.view[slot] if self.channels_last else self.view[slot].t()


def limit(target: Target) -> float:
    return target.case_bar().out


def check_call(
    target: Target,
    lens: Sequence[int],
    *,
    width: int = 4,
    channels_last: bool = True,
    bias: bool = True,
    silu: bool = True,
    fresh: Sequence[int] = (),
    padding: Sequence[int] = (),
    weight_dtype: torch.dtype = torch.float32,
    extra: int = 0,
    channels: int = CHANNELS,
) -> None:
    """One call on strided slices with gaps between the segments: outputs, windows, and nothing else."""
    first, position = [], 2
    for n in lens:
        first.append(position)
        position += n + 1
    buffer = torch.full((position + 3, 3 * channels), float("nan"), dtype=target.dtype, device=target.device)
    x, out = buffer[:, channels : 2 * channels], torch.full_like(buffer, float("nan"))[:, :channels]
    for n, (f, count) in enumerate(zip(first, lens, strict=True)):
        x[f : f + count] = target.normal(count, channels, seed=100 + n)
    weight = target.normal(channels, width, seed=1, dtype=weight_dtype)
    offset = target.normal(channels, seed=2, dtype=torch.float32) if bias else None
    slots = some_slots(len(lens))
    pool = Windows(
        target, 2 * len(lens) + 3, width - 1 + extra, channels_last, target.dtype, poison=True, channels=channels
    )
    for n, slot in enumerate(slots):
        if n not in fresh:
            pool.put_window(slot, target.normal(width - 1, channels, seed=200 + n))
    old = [pool.window(slot)[: width - 1].double().cpu().clone() for slot in slots]
    target.conv(
        x,
        weight,
        offset,
        segments=Segments.from_lengths(lens, target.device, first),
        state=pool.view,
        slots=target.index([-1 if n in padding else slot for n, slot in enumerate(slots)]),
        has_initial_state=target.index([n not in fresh for n in range(len(lens))], torch.bool),
        activation="silu" if silu else None,
        channels_last=channels_last,
        out=out,
    )
    for n, (f, count) in enumerate(zip(first, lens, strict=True)):
        if n in padding:
            all_zero("outputs of padding rows", out[f : f + count])
            continue
        history = None if n in fresh else old[n]
        y, window = reference.causal_conv(
            x[f : f + count].cpu(), weight.cpu(), None if offset is None else offset.cpu(), history, silu
        )
        within(f"outputs of segment {n}", relative_error(out[f : f + count], y), limit(target))
        got = pool.window(slots[n])[: width - 1]
        same_bits(f"window of segment {n}", got.contiguous(), window.to(got))
        out[f : f + count] = float("nan")
    pool.unchanged(slot for n, slot in enumerate(slots) if n not in padding)
    if not all(bool(torch.isnan(out[f + count : f + count + 1]).all()) for f, count in zip(first, lens, strict=True)):
        fail("output rows that no segment covers were written")


@case("B82", width=(2, 3, 4), channels_last=(True, False))
def windows_of_short_and_long_segments(target: Target, width: int, channels_last: bool) -> None:
    """Segments shorter than the window keep its surviving entries; empty ones leave it unchanged or zero."""
    check_call(target, [1, 2, 0, 3, 7, 0, 40, 1], width=width, channels_last=channels_last, fresh=[5, 7])


@case("conv", bias=(True, False), silu=(True, False))
def bias_and_activation(target: Target, bias: bool, silu: bool) -> None:
    """With and without either."""
    check_call(target, [9, 2], bias=bias, silu=silu)


@case("conv", channels=(1, 1000, 3072), channels_last=(True, False))
def any_number_of_channels(target: Target, channels: int, channels_last: bool) -> None:
    """Channel counts that are no multiple of a block, and more than one block of tokens."""
    channels = min(channels, 200) if target.interpreted else channels
    check_call(target, [130, 3, 1], channels=channels, channels_last=channels_last, fresh=[1])


@case("B96", weight_dtype=(torch.float32, torch.bfloat16, torch.float16))
def weight_dtypes(target: Target, weight_dtype: torch.dtype) -> None:
    """Weights in any float dtype are taken as they are."""
    check_call(target, [9, 2], weight_dtype=weight_dtype)


@case("B68")
def stale_windows(target: Target) -> None:
    """Windows of earlier tenants hold NaN: a fresh segment starts from zeros, by selection."""
    check_call(target, [3, 20, 0, 1], fresh=[0, 2, 3])


@case("B61-B62")
def padding_rows_of_the_convolution(target: Target) -> None:
    """Padding rows write zeros and leave their windows alone; windows longer than W - 1 are allowed."""
    check_call(target, [4, 1, 6], padding=[1], extra=3)


@case("B82")
def one_channel_by_hand(target: Target) -> None:
    """Window 1 2 3 and the chunk 7: window 2 3 7. Then 7 8: 3 7 8. Nothing: unchanged. Fresh and 7: 0 0 7."""
    weight = torch.ones(1, 4, device=target.device)
    for chunk, fresh, want in (
        ([7], False, [2, 3, 7]),
        ([7, 8], False, [3, 7, 8]),
        ([], False, [1, 2, 3]),
        ([7], True, [0, 0, 7]),
    ):
        pool = torch.tensor([[9.0, 9, 9], [1, 2, 3]], device=target.device).to(target.dtype)[:, None]
        x = torch.tensor(chunk, device=target.device, dtype=target.dtype)[:, None]
        target.conv(
            x,
            weight,
            segments=Segments.from_lengths([len(chunk)], target.device),
            state=pool,
            slots=target.index([1]),
            has_initial_state=target.index([not fresh], torch.bool),
        )
        if pool[1, 0].tolist() != want or pool[0, 0].tolist() != [9, 9, 9]:
            fail(f"chunk {chunk}: window must be {want}, got {pool[1, 0].tolist()} beside {pool[0, 0].tolist()}")


@case("B82")
def any_split_gives_the_same_outputs(target: Target) -> None:
    """Ten tokens cut at every point, through the window: the same outputs, up to rounding."""
    x, weight = target.normal(10, CHANNELS), target.normal(CHANNELS, 4, seed=1)
    whole = target.conv(x, weight, segments=Segments.from_lengths([10], target.device))
    within("outputs", relative_error(whole, reference.causal_conv(x.cpu(), weight.cpu())[0]), limit(target))
    for cut in range(11):
        pool = Windows(target, 3, 3, False, target.dtype)
        parts = []
        for start, stop in ((0, cut), (cut, 10)):
            parts.append(
                target.conv(
                    x[start:stop],
                    weight,
                    segments=Segments.from_lengths([stop - start], target.device),
                    state=pool.view,
                    slots=target.index([1]),
                    has_initial_state=target.index([start > 0], torch.bool),
                )
            )
        within(f"outputs cut at {cut}", relative_error(torch.cat(parts), whole.double().cpu()), limit(target))


@case("B84")
def left_padding(target: Target) -> None:
    """Rows before a segment's first token, whatever they hold, do not reach it."""
    check_call(target, [10], fresh=[0])
    check_call(target, [10])


@case("B48", channels_last=(True, False))
def window_after_accepted_drafts(target: Target, channels_last: bool) -> None:
    """Verify 4 tokens, accept 1 to 4; verify again, accept some; then plain steps continue from the right window."""
    count, k1, width = 4, 4, 4
    stream = target.normal(count, 16, CHANNELS, seed=7)
    weight = target.normal(CHANNELS, width, seed=1)
    pool = Windows(target, 12, width - 1 + 3, channels_last, target.dtype, poison=True)
    slots = [5, 2, 9, 7]
    for n, slot in enumerate(slots):
        pool.put_window(slot, target.normal(width - 1, CHANNELS, seed=300 + n))
    history = [pool.window(slot)[: width - 1].double().cpu().clone() for slot in slots]
    accepted = [[0] * 4, [1, 2, 3, 4], [4, 2, 1, 3], [0] * 4, [0] * 4]  # of the step before
    lens = [k1, k1, 1, 3, 0]
    kept: list[Tensor] = [torch.zeros(0, CHANNELS, dtype=torch.float64) for _ in slots]
    previous: list[Tensor] = []
    for step, (length, counts) in enumerate(zip(lens, accepted, strict=True)):
        x = stream[:, 3 * step : 3 * step + length].flatten(0, 1)
        if previous:
            kept = [torch.cat([k, p[: a or p.shape[0]]]) for k, p, a in zip(kept, previous, counts, strict=True)]
        drafts = step < 2
        out = target.conv(
            x,
            weight,
            segments=Segments.equal(count, length, target.device),
            state=pool.view,
            slots=target.index(slots),
            accepted=target.index(counts) if step < 3 else None,
            keep_all=drafts,
            channels_last=channels_last,
        )
        new = list(x.unflatten(0, (count, length)).double().cpu())
        for n in range(count):
            y, window = reference.causal_conv(torch.cat([kept[n], new[n]]), weight.cpu(), None, history[n])
            if length:
                got = out[n * length : (n + 1) * length]
                within(f"step {step}, request {n}", relative_error(got, y[-length:]), limit(target))
            if not drafts:
                now = pool.window(slots[n])[: width - 1]
                same_bits(f"window after step {step}, request {n}", now.contiguous(), window.to(now))
        previous = new
    pool.unchanged(slots)


@case("B47")
def accepted_counts_out_of_range_in_the_window(target: Target) -> None:
    """Counts outside 1 to 1 + k_max are clamped: no entry outside the request's own window is read."""
    window = target.normal(6, CHANNELS, seed=5)
    weight = target.normal(CHANNELS, 4, seed=1)
    x = target.normal(6, CHANNELS, seed=6)
    wild = [-5, 0, 1, 4, 5, 2**31 - 1]
    pool = Windows(target, 14, 6, True, target.dtype, poison=True)
    slots = some_slots(6)
    for slot in slots:
        pool.put_window(slot, window)
    out = target.conv(
        x,
        weight,
        segments=Segments.equal(6, 1, target.device),
        state=pool.view,
        slots=target.index(slots),
        accepted=target.index(wild),
        channels_last=True,
    )
    for n, count in enumerate(wild):
        start = min(max(count, 1), 4) - 1
        y, _ = reference.causal_conv(x[n : n + 1].cpu(), weight.cpu(), None, window[start : start + 3].cpu())
        within(f"output with accepted {count}", relative_error(out[n : n + 1], y), limit(target))
    pool.unchanged(slots)


@case("B56", shift=(1, 2, 3))
def windows_shift_in_place(target: Target, shift: int) -> None:
    """Shifting a wide window left in place is a move, not a copy that overtakes itself."""
    channels, length = 64 if target.interpreted else 6144, 10
    pool = torch.arange(length, device=target.device, dtype=target.dtype).repeat(2, channels, 1).contiguous()
    before = pool.clone()
    x = torch.zeros(1, channels, dtype=target.dtype, device=target.device)
    target.conv(
        x,
        torch.ones(channels, 4, device=target.device),
        segments=Segments.equal(1, 1, target.device),
        state=pool,
        slots=target.index([1]),
        accepted=target.index([shift]),
    )
    want = torch.tensor([shift, shift + 1, 0], dtype=target.dtype, device=target.device)
    same_bits("the shifted window", pool[1, :, :3].contiguous(), want.repeat(channels, 1))
    same_bits("the other slot", pool[0], before[0])


@case("B70", channels_last=(True, False))
def windows_at_checkpoints(target: Target, channels_last: bool) -> None:
    """The windows after given token offsets, from the launch that computes the outputs."""
    lens = [40, 3, 33]
    x, weight = target.normal(sum(lens), CHANNELS), target.normal(CHANNELS, 4, seed=1)
    exports = Windows(target, 9, 3, channels_last, target.dtype, poison=True)
    entries = [(0, 16, 7), (0, 32, 2), (2, 16, 5), (2, 32, 1)]
    target.conv(
        x,
        weight,
        segments=Segments.from_lengths(lens, target.device),
        channels_last=channels_last,
        checkpoints=Checkpoints.build(entries, 3, target.device),
        checkpoint_pool=exports.view,
    )
    for n, at, row in entries:
        end = sum(lens[:n]) + at
        same_bits(f"window of segment {n} after {at}", exports.window(row).contiguous(), x[end - 3 : end])
    exports.unchanged([row for *_, row in entries])
