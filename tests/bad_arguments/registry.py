"""Good calls of every public operator, the table of what spoils them, and how a spoiled call is judged."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rapidkda
from rapidkda import Checkpoints, Segments, Sizes

T, H, HV, K, V = 24, 2, 4, 8, 6
C, W = 10, 4
LENS = [20, 4]

Arguments = dict[str, Any]


def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)


def kda_operands() -> Arguments:
    return {
        "q": normal(T, H, K),
        "k": normal(T, H, K),
        "v": normal(T, HV, V),
        "g": normal(T, HV, K),
        "beta": normal(T, HV),
        "A_log": normal(HV),
        "dt_bias": normal(HV, K),
        "lower_bound": -5.0,
        "out": torch.full((T, HV, V), 7.0),
        "state": normal(9, HV, V, K),
    }


def prefill() -> Arguments:
    return kda_operands() | {
        "segments": Segments.from_lengths(LENS),
        "slots": torch.tensor([3, 1], dtype=torch.int32),
        "has_initial_state": torch.tensor([True, False]),
        "checkpoints": Checkpoints.build([(0, 16, 2)], 2),
        "checkpoint_pool": torch.full((4, HV, V, K), 7.0),
    }


def decode() -> Arguments:
    return kda_operands() | {
        "segments": Segments.from_lengths([1, 1], first_token=[3, 9]),
        "slots": torch.tensor([3, 1], dtype=torch.int32),
    }


def verify() -> Arguments:
    return kda_operands() | {
        "segments": Segments.from_lengths([3, 2]),
        "slots": torch.tensor([[3, 1, 4], [2, 5, 6]], dtype=torch.int32),
        "accepted": torch.tensor([1, 2], dtype=torch.int32),
    }


def replay() -> Arguments:
    return verify() | {"slots": torch.tensor([3, 1], dtype=torch.int32), "records": normal(9, 3, HV, 2 * K + V)}


def deferred() -> Arguments:
    return replay() | {"held": torch.zeros(9, HV, dtype=torch.int32)}


def commit() -> Arguments:
    return {
        "state": normal(9, HV, V, K),
        "records": normal(9, 3, HV, 2 * K + V),
        "slots": torch.tensor([3, 1], dtype=torch.int32),
        "accepted": torch.tensor([1, 2], dtype=torch.int32),
        "held": torch.zeros(9, HV, dtype=torch.int32),
    }


def whole() -> Arguments:
    operands = kda_operands()
    return {
        **{name: operands[name][None] for name in ("q", "k", "v", "g", "beta")},
        "initial_state": normal(2, HV, K, V),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": -5.0,
        "A_log": operands["A_log"],
        "dt_bias": operands["dt_bias"],
        "cu_seqlens": torch.tensor([0, 20, 24]),
    }


def conv() -> Arguments:
    return {
        "x": normal(T, C),
        "weight": normal(C, W),
        "bias": normal(C),
        "segments": Segments.from_lengths(LENS),
        "state": normal(9, C, W - 1),
        "slots": torch.tensor([3, 1], dtype=torch.int32),
        "out": torch.full((T, C), 7.0),
    }


def layer() -> Arguments:
    operands = prefill()
    parts = [operands.pop(name).flatten(1) for name in "qkv"]
    x = torch.cat(parts, 1)
    return operands | {
        "x": x,
        "heads": H,
        "conv_weight": normal(x.shape[1], W),
        "conv_state": normal(9, x.shape[1], W - 1),
        "conv_checkpoint_pool": torch.full((4, x.shape[1], W - 1), 7.0),
        "conv_out": torch.full(x.shape, 7.0),
        "z": normal(T, HV, V),
        "norm_weight": normal(V),
    }


def norm() -> Arguments:
    return {"x": normal(T, H, K), "z": normal(T, H, K), "weight": normal(K), "out": torch.full((T, H, K), 7.0)}


def resolve() -> Arguments:
    return {"device": "cpu"}


def workspace() -> Arguments:
    return {"op": "prefill", "sizes": Sizes(tokens=4, segments=1, heads=2, value_heads=2), "device": "cpu"}


GOOD: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "prefill": (rapidkda.prefill, prefill),
    "prefill_layer": (rapidkda.prefill_layer, layer),
    "decode": (rapidkda.decode, decode),
    "verify": (rapidkda.verify, verify),
    "replay": (rapidkda.verify, replay),
    "deferred": (rapidkda.verify, deferred),
    "commit": (rapidkda.commit, commit),
    "chunk_kda": (rapidkda.chunk_kda, whole),
    "fused_recurrent_kda": (rapidkda.fused_recurrent_kda, whole),
    "causal_conv": (rapidkda.causal_conv, conv),
    "gated_rms_norm": (rapidkda.gated_rms_norm, norm),
    "resolve": (rapidkda.resolve_kda_prefill_backend, resolve),
    "workspace_bytes": (rapidkda.workspace_bytes, workspace),
}


@dataclass(frozen=True)
class BadCall:
    """`change` makes a good call wrong; it must then raise `error` with `argument` in its message."""

    id: str
    op: str
    change: Callable[[Arguments], Arguments]
    error: type[Exception]
    argument: str
    debug: bool  # only found with RAPIDKDA_CHECK=1, since the values live on the device


CALLS: list[BadCall] = []


def bad(
    ops: str,
    argument: str,
    what: str,
    value: Any,
    error: type[Exception] = ValueError,
    *,
    named: str | None = None,
    debug: bool = False,
) -> None:
    """Register `argument=value` (or value(good argument), or value(all arguments)) for each operator in `ops`."""

    def change(arguments: Arguments) -> Arguments:
        if not callable(value):
            return arguments | {argument: value}
        return arguments | {argument: value(arguments[argument])}

    for op in ops.split():
        CALLS.append(BadCall(f"{op}-{argument}-{what}", op, change, error, named or argument, debug))


def bad_set(op: str, what: str, named: str, changes: Arguments, error: type[Exception] = ValueError) -> None:
    """Register several arguments that are wrong together."""
    CALLS.append(BadCall(f"{op}-{what}", op, lambda arguments: arguments | changes, error, named, False))


def meta(x: Tensor) -> Tensor:
    return x.to("meta")


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def every_second(x: Tensor) -> Tensor:
    """The same shape with a last dimension of stride 2."""
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


KDA = "prefill decode verify"
WHOLE = "chunk_kda fused_recurrent_kda"


def tensors(arguments: Arguments) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            yield name, value


def as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)


@contextmanager
def debug_mode(on: bool) -> Iterator[None]:
    before = os.environ.pop("RAPIDKDA_CHECK", None)
    if on:
        os.environ["RAPIDKDA_CHECK"] = "1"
    try:
        yield
    finally:
        os.environ.pop("RAPIDKDA_CHECK", None)
        if before is not None:
            os.environ["RAPIDKDA_CHECK"] = before


def problem_with(call: BadCall) -> str | None:
    """What is wrong with how the library takes a bad call; None if it refuses it as it should."""
    function, good = GOOD[call.op]
    arguments = call.change(good())
    before = {name: value.clone() for name, value in tensors(arguments)}
    try:
        with debug_mode(call.debug):
            function(**arguments)
    except Exception as error:
        if not isinstance(error, call.error):
            return f"raised {type(error).__name__} ({error}) instead of {call.error.__name__}"
        if not re.search(rf"(?<!\w){re.escape(call.argument)}(?!\w)", str(error)):
            return f"message does not name {call.argument}: {error}"
    else:
        return "raised nothing"
    for name, value in tensors(arguments):
        if not torch.equal(as_bytes(value), as_bytes(before[name])):
            return f"{name} was written"
    return None
