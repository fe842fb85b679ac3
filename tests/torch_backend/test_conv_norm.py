"""Convolution and gated norm of the torch backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rapidkda import Segments, ops, reference
from rapidkda.segments import Checkpoints
from rapidkda.testing.tolerances import relative_error

CHANNELS, WIDTH = 24, 4


def conv(x: Tensor, weight: Tensor, segments: Segments, **options: object) -> Tensor:
    out = torch.full(x.shape, float("nan"), dtype=x.dtype)
    return ops.causal_conv(x, weight, segments=segments, out=out, backend="torch", **options)


@pytest.mark.parametrize("channels_last", [False, True])
def test_outputs_and_histories(channels_last: bool) -> None:
    torch.manual_seed(0)
    lens, first = [10, 1, 0, 3, 600, 2, 0], [20, 31, 3, 0, 40, 35, 9]
    x = torch.randn(645, CHANNELS)
    weight, bias = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)
    history = torch.randn(7, CHANNELS, WIDTH - 1)
    pool = torch.full((10, CHANNELS, WIDTH + 1), 1000.0)
    slots = torch.tensor([4, 0, 6, 9, 2, 44, 7])  # row 5 is padding
    fresh = torch.tensor([0, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    for n in (0, 1, 2, 3, 4, 6):
        pool[slots[n], :, : WIDTH - 1] = float("nan") if fresh[n] else history[n]
    given = pool.transpose(1, 2).contiguous() if channels_last else pool
    segments = Segments.from_lengths(lens, first_token=first)
    out = conv(
        x, weight, segments, bias=bias, state=given, slots=slots, has_initial_state=~fresh, channels_last=channels_last
    )
    pool = given.transpose(1, 2) if channels_last else given
    covered = torch.zeros(645, dtype=torch.bool)
    for n, (start, length) in enumerate(zip(first, lens, strict=True)):
        covered[start : start + length] = True
        if n == 5:
            assert not out[start : start + length].any()
            continue
        old = torch.zeros(WIDTH - 1, CHANNELS) if fresh[n] else history[n].T
        want, last = reference.causal_conv(x[start : start + length], weight, bias, old)
        assert relative_error(out[start : start + length], want) < 1e-6
        assert torch.equal(pool[slots[n], :, : WIDTH - 1].double(), last.T)
    assert out[~covered].isnan().all()
    assert (pool[[1, 3, 5, 8]] == 1000.0).all()
    assert (pool[:, :, WIDTH - 1 :] == 1000.0).all()


def test_every_split_gives_the_same_bits() -> None:
    x, weight = torch.randn(10, CHANNELS), torch.randn(CHANNELS, WIDTH)
    whole = conv(x, weight, Segments.from_lengths([10]))
    for cut in range(11):
        pool = torch.zeros(1, CHANNELS, WIDTH - 1)
        pieces = [
            conv(part, weight, Segments.from_lengths([len(part)]), state=pool, slots=torch.tensor([0]))
            for part in (x[:cut], x[cut:])
        ]
        assert torch.equal(torch.cat(pieces), whole)


def test_verification_rolls_back() -> None:
    torch.manual_seed(1)
    weight, most = torch.randn(CHANNELS, WIDTH), 4
    pool = torch.zeros(2, CHANNELS, WIDTH - 2 + most)
    slots, segments = torch.tensor([1, 0]), Segments.from_lengths([4, 2])
    streams: list[list[Tensor]] = [[], []]
    accepted = torch.zeros(2, dtype=torch.int32)
    for step in range(4):
        x = torch.randn(6, CHANNELS)
        out = conv(x, weight, segments, state=pool, slots=slots, accepted=accepted, keep_all=True)
        accepted = torch.tensor([1 + step, 1 + step % 2], dtype=torch.int32)
        for n, rows in enumerate((slice(0, 4), slice(4, 6))):
            context = torch.stack(streams[n]) if streams[n] else torch.zeros(0, CHANNELS)
            want, _ = reference.causal_conv(torch.cat([context, x[rows]]), weight)
            assert relative_error(out[rows], want[len(context) :]) < 1e-6
            streams[n] += list(x[rows][: accepted[n]])
    x = torch.randn(3, CHANNELS)  # ordinary tokens afterwards
    out = conv(x, weight, Segments.from_lengths([1, 2]), state=pool, slots=slots, accepted=accepted)
    for n, rows in enumerate((slice(0, 1), slice(1, 3))):
        want, last = reference.causal_conv(torch.cat([torch.stack(streams[n]), x[rows]]), weight)
        assert relative_error(out[rows], want[len(streams[n]) :]) < 1e-6
        assert torch.equal(pool[slots[n], :, : WIDTH - 1].double(), last.T)


def test_checkpoints() -> None:
    x, weight = torch.randn(50, CHANNELS), torch.randn(CHANNELS, WIDTH)
    exported = torch.full((4, CHANNELS, WIDTH), 1000.0)
    checkpoints = Checkpoints.build([(0, 16, 2), (1, 16, 0), (1, 32, 3)], 2)
    conv(x, weight, Segments.from_lengths([17, 33]), checkpoints=checkpoints, checkpoint_pool=exported)
    for start, slot in ((16, 2), (33, 0), (49, 3)):
        assert torch.equal(exported[slot, :, : WIDTH - 1], x[start - 3 : start].T)
    assert (exported[1] == 1000.0).all()
    assert (exported[:, :, WIDTH - 1 :] == 1000.0).all()


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_per_head(activation: str, dtype: torch.dtype) -> None:
    x = torch.randn(300, 2, 128)
    x[:, 1] *= 10
    z = torch.randn(300, 4, 128)[:, 1:3]
    x, z, weight = x.to(dtype), z.to(dtype), torch.rand(128) + 0.5
    want = reference.gated_rms_norm(x, z, weight, 1e-5, activation)
    out = ops.gated_rms_norm(x, z, weight, activation=activation, out=x, backend="torch")
    for head in range(2):
        assert relative_error(out[:, head], want[:, head]) < (1e-6 if dtype == torch.float32 else 4e-3)
