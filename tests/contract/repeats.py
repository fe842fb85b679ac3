"""Calls of one kind, one after another on memory of their own: nothing that is kept from call to call is an address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rapidkda import Checkpoints, Sizes, ops
from rapidkda.ops import kinds
from rapidkda.testing import Shape, make_inputs

from .cases import case
from .guards import same_bits
from .target import Target

ROWS = 9
Call = tuple[Callable[..., Any], dict[str, Any]]


def _operands(target: Target, seed: int, lens: list[int], heads: int = 2) -> dict[str, Any]:
    """Operands as slices of one buffer, with pools of states."""
    shape = Shape("repeated", tuple(lens), heads)
    inputs = make_inputs(shape, dtype=target.dtype, device=target.device, seed=seed, layout="fused")
    names = ("q", "k", "v", "g", "beta")
    return {
        **dict(zip(names, inputs.operands(), strict=True)),
        **inputs.options(),
        "segments": inputs.segments,
        "state": target.normal(ROWS, heads, 128, 128, seed=seed, dtype=torch.float32),
        "out": torch.zeros_like(inputs.v),
    }


def _prefill(target: Target, seed: int, lens: list[int]) -> Call:
    given = _operands(target, seed, lens)
    sizes = Sizes(sum(lens), len(lens), 2, 2, dtype=target.dtype)
    needed = target.backend.workspace_bytes("prefill", sizes)
    return ops.prefill, given | {
        "slots": target.index([3, 1][: len(lens)]),
        "read_slots": target.index([2 + seed, 1][: len(lens)]),
        "has_initial_state": target.index([True, seed % 2 == 0][: len(lens)], torch.bool),
        "checkpoints": Checkpoints.build([(0, 16, 2)], len(lens), target.device),
        "checkpoint_pool": torch.zeros(4, 2, 128, 128, device=target.device),
        "workspace": torch.zeros(needed, dtype=torch.uint8, device=target.device) if needed else None,
    }


def _decode(target: Target, seed: int) -> Call:
    rows = {"slots": target.index([seed, 5]), "read_slots": target.index([6, 7])}
    return ops.decode, _operands(target, seed, [1, 1]) | rows


def _verify(target: Target, seed: int, form: str) -> Call:
    given = _operands(target, seed, [3, 2]) | {"accepted": target.index([1, 1 + seed % 3])}
    if form == "slots":
        return ops.verify, given | {"slots": target.index([[0, 1, 2], [3, 4, 5 + seed]])}
    records = target.normal(ROWS, 5 if form == "deferred" else 3, 2, 3 * 128, seed=seed + 9, dtype=torch.float32)
    given |= {"slots": target.index([seed, 5]), "records": -records.abs()}
    return ops.verify, given | ({"held": target.index([[seed % 2, 2]] * ROWS)} if form == "deferred" else {})


def _commit(target: Target, seed: int, form: str) -> Call:
    given = _verify(target, seed, form)[1]
    return ops.commit, {"held": None} | {
        n: x for n, x in given.items() if n in ("state", "records", "slots", "accepted", "held")
    }


def _conv(target: Target, seed: int) -> Call:
    x = target.normal(22, 64, seed=seed)
    return ops.causal_conv, {
        "x": x,
        "weight": target.normal(64, 4, seed=seed + 9),
        "bias": target.normal(64, seed=seed + 19),
        "segments": _operands(target, seed, [20, 2])["segments"],
        "state": target.normal(ROWS, 64, 3, seed=seed + 29),
        "slots": target.index([seed, 5]),
        "read_slots": target.index([6, 7]),
        "out": torch.zeros_like(x),
    }


def _norm(target: Target, seed: int) -> Call:
    x = target.normal(22, 2, 128, seed=seed)
    weight = target.normal(128, seed=seed + 19)
    return ops.gated_rms_norm, {"x": x, "z": target.normal(22, 2, 128, seed=seed + 9), "weight": weight, "out": x}


def _layer(target: Target, seed: int) -> Call:
    """Chains enough to fill a device, where the neighbours are fused."""
    heads, count = 24, 6
    given = _operands(target, seed, [20] * count, heads)
    parts = [given.pop(name).flatten(1) for name in "qkv"]
    for name in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"):
        del given[name]
    return ops.prefill_layer, given | {
        "x": torch.cat(parts, 1),
        "conv_weight": target.normal(3 * heads * 128, 4, seed=seed + 9, dtype=torch.float32),
        "conv_state": target.normal(ROWS, 3, 3 * heads * 128, seed=seed + 19),
        "channels_last": True,
        "z": target.normal(20 * count, heads, 128, seed=seed + 29),
        "norm_weight": target.normal(128, seed=seed + 39, dtype=torch.float32),
        "slots": target.index(list(range(count))),
        "read_slots": target.index([6 + seed % 3, *range(1, count)]),
        "conv_read_slots": target.index([8 - seed % 3, *range(1, count)]),
    }


CALLS: dict[str, Callable[[Target, int], Call]] = {
    "prefill": lambda target, seed: _prefill(target, seed, [40, 2]),
    "long prefill": lambda target, seed: _prefill(target, seed, [target.tokens(2048)]),
    "decode": _decode,
    "slots": lambda target, seed: _verify(target, seed, "slots"),
    "replay": lambda target, seed: _verify(target, seed, "replay"),
    "deferred": lambda target, seed: _verify(target, seed, "deferred"),
    "commit": lambda target, seed: _commit(target, seed, "replay"),
    "commit deferred": lambda target, seed: _commit(target, seed, "deferred"),
    "conv": _conv,
    "norm": _norm,
    "layer": _layer,
}


@case("kinds", slow_when_interpreted=True, op=tuple(CALLS))
def later_calls_of_a_kind_read_and_write_their_own_memory(target: Target, op: str) -> None:
    """Four calls on tensors and values of their own give the bits that each gives as the first of its kind."""
    wanted = []
    for seed in range(4):
        kinds.forget()
        run, given = CALLS[op](target, seed)
        run(**given, backend=target.name)
        wanted.append(given)
    kinds.forget()
    calls = [CALLS[op](target, seed) for seed in range(4)]
    for run, given in calls:
        run(**given, backend=target.name)
    for (_, given), want in zip(calls, wanted, strict=True):
        for name, value in want.items():
            if isinstance(value, Tensor) and name != "workspace":
                same_bits(name, given[name], value)
