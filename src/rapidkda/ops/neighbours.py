"""KDA's neighbours in a layer: the causal convolution before it and the gated norm after it."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .. import checks, env
from ..backends.base import Backend, Request
from ..device import Device
from ..problem import ConvCall, NormCall
from ..segments import Checkpoints, Segments
from . import bind, bind_requests, kinds
from .choose import BackendLike, resolved


def check_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segments: Segments,
    state: Tensor | None,
    slots: Tensor | None,
    read_slots: Tensor | None,
    has_initial_state: Tensor | None,
    accepted: Tensor | None,
    keep_all: bool,
    activation: str | None,
    channels_last: bool,
    pad_slot: int,
    checkpoints: Checkpoints | None,
    checkpoint_pool: Tensor | None,
    prefix: str = "",
) -> tuple[Segments, int, Tensor | None, Checkpoints | None]:
    """Check the arguments of a convolution but `out`; returns those that have a second form, in the one of calls.

    `prefix` of the names of weight, state, read_slots and checkpoint_pool.
    """
    checks.tensor("x", x)
    if x.ndim != 2:
        raise ValueError(f"x must have shape [T, C], got {list(x.shape)}")
    checks.dtype("x", x, checks.FLOATS)
    checks.dense_last("x", x)
    checks.tensor(f"{prefix}weight", weight)
    checks.shape(f"{prefix}weight", weight, (x.shape[1], None), "[C, W]")
    checks.dtype(f"{prefix}weight", weight, checks.FLOATS)
    checks.same_device(f"{prefix}weight", weight, x.device)
    width = weight.shape[1]
    if not 2 <= width <= 8:
        raise ValueError(f"{prefix}weight must have a width W of 2 to 8, got {width}")
    if bias is not None:
        checks.tensor("bias", bias)
        checks.shape("bias", bias, (x.shape[1],), "[C]")
        checks.dtype("bias", bias, checks.FLOATS)
        checks.same_device("bias", bias, x.device)
    checks.choice("activation", activation, ("silu", None))
    checks.boolean("channels_last", channels_last)
    checks.boolean("keep_all", keep_all)
    segments = bind_requests.segment_table(segments, x.shape[0], x.device)
    pad_slot = bind_requests.pad_marker(pad_slot)
    if state is None:
        given = {
            "slots": slots,
            f"{prefix}read_slots": read_slots,
            "has_initial_state": has_initial_state,
            "accepted": accepted,
        }
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} must be None without a state pool, got a tensor")
        if keep_all:
            raise ValueError("keep_all must be False without a state pool, got True")
    else:
        bind_requests.conv_pool(f"{prefix}state", state, x, width, channels_last)
        if slots is None:
            raise ValueError("slots must be given with a state pool, got None")
        bind_requests.slots_of_segments(slots, read_slots, segments.count, state.shape[0], pad_slot, x.device, prefix)
        has_initial_state = bind_requests.flags("has_initial_state", has_initial_state, segments.count, x.device)
        most = state.shape[1 if channels_last else 2] - width + 2
        if accepted is not None:
            bind_requests.accepted(accepted, segments.count, most, x.device)
        if keep_all and segments.max_length > most:
            raise ValueError(
                f"segments must have at most {most} tokens each with keep_all (state length - W + 2), "
                f"got {segments.max_length}"
            )
    if checkpoint_pool is not None:
        bind_requests.conv_pool(f"{prefix}checkpoint_pool", checkpoint_pool, x, width, channels_last)
    checkpoints = bind_requests.checkpoints(checkpoints, checkpoint_pool, segments, x.device)
    return segments, pad_slot, has_initial_state, checkpoints


def conv_backend(x: Tensor, state: Tensor | None, backend: BackendLike, argument: str = "backend") -> Backend:
    """The backend for a convolution; `argument`: what the caller knows `backend` by."""
    request = Request("conv", Device.of(x.device), x.dtype, state_dtype=x.dtype if state is None else state.dtype)
    return resolved(request, backend, env.DECODE_BACKEND, argument)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    segments: Segments,
    state: Tensor | None = None,
    slots: Tensor | None = None,
    read_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    accepted: Tensor | None = None,
    keep_all: bool = False,
    activation: Literal["silu"] | None = "silu",
    channels_last: bool = False,
    out: Tensor | None = None,
    pad_slot: int = -1,
    checkpoints: Checkpoints | None = None,
    checkpoint_pool: Tensor | None = None,
    backend: BackendLike = None,
) -> Tensor:
    """Depthwise causal convolution of a step's segments, with history, for prefill, decode and verification.

    Args:
        x: [T, C], bfloat16, float16 or float32, last dimension dense.
        weight: [C, W], any of those dtypes; bias: [C]. W is 2 or more.
        segments: as in `prefill`.
        state: history pool [S, C, L], or [S, L, C] with `channels_last`; float32, bfloat16 or the dtype of x;
            L >= W - 1, and W - 1 + k_max where drafts are verified. Entries are inputs, oldest first.
        slots, read_slots, has_initial_state, pad_slot: as in `prefill`.
        accepted: int32 or int64 [N], tokens accepted of the request's previous verify step, 0 or 1 to 1 + k_max: the
            history starts at entry accepted - 1 (entry 0 for 0). Without it, at entry 0.
        keep_all: this is a verify step: keep all of its tokens, so that the next step can roll back to any of them.
        activation: "silu" or None.
        out: [T, C], dtype of x.
        checkpoints, checkpoint_pool: histories to export at token offsets (multiples of 16), at entry 0.

    Returns:
        `out`.
    """
    within = checkpoint_pool is state  # told apart by the kind: guards of torch take no tensor twice
    exported = None if within else checkpoint_pool
    key, kind, given = kinds.find(
        "conv",
        backend,
        env.DECODE_BACKEND,
        segments,
        checkpoints,
        (x, weight, bias, state, slots, read_slots, has_initial_state, accepted, out, exported),
        (keep_all, activation, channels_last, pad_slot, within),
    )
    if kind is None:
        segments, pad_slot, has_initial_state, checkpoints = check_conv(
            x,
            weight,
            bias,
            segments,
            state,
            slots,
            read_slots,
            has_initial_state,
            accepted,
            keep_all,
            activation,
            channels_last,
            pad_slot,
            checkpoints,
            checkpoint_pool,
        )
        if out is not None:
            bind.output(out, tuple(x.shape), "[T, C]", x, (x, state))
        chosen = conv_backend(x, state, backend)
        kind = kinds.keep(key, kinds.Kind(chosen, covered=bind.covers(segments, x.shape[0])))
    elif out is not None:
        if kind.repeats(given, segments, checkpoints):
            return out
        bind.apart(out, (x, state))
    if out is None:
        out = bind.new_output(x, kind.covered)
    call = ConvCall(
        x=x,
        weight=weight,
        bias=bias,
        out=out,
        segments=segments,
        pool=state,
        channels_last=channels_last,
        read_slots=slots if read_slots is None else read_slots,
        write_slots=slots,
        has_initial_state=has_initial_state,
        accepted=accepted,
        keep_all=keep_all,
        silu=activation == "silu",
        pad_slot=pad_slot,
        checkpoints=checkpoints,
        checkpoint_pool=checkpoint_pool,
    )
    call.memo = kind.memo
    kind.backend.conv(call)
    kind.learn(call.repeat, given, segments, checkpoints, out, (x, state))
    return out


def check_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    activation: str,
    names: tuple[str, str, str] = ("weight", "eps", "activation"),
) -> None:
    """Check the arguments of a gated norm but `segments` and `out`; `names` of the last three."""
    of_weight, of_eps, of_activation = names
    checks.tensor("x", x)
    checks.tensor("z", z)
    checks.tensor(of_weight, weight)
    if x.ndim != 3:
        raise ValueError(f"x must have shape [T, H, D], got {list(x.shape)}")
    checks.dtype("x", x, checks.FLOATS)
    checks.shape("z", z, tuple(x.shape), "[T, H, D]")
    checks.dtype("z", z, checks.FLOATS)
    checks.shape(of_weight, weight, (x.shape[2],), "[D]")
    checks.dtype(of_weight, weight, checks.FLOATS)
    for name, value in (("x", x), ("z", z), (of_weight, weight)):
        checks.dense_last(name, value)
        checks.same_device(name, value, x.device)
    if checks.finite(of_eps, eps) <= 0:
        raise ValueError(f"{of_eps} must be positive, got {eps}")
    checks.choice(of_activation, activation, ("sigmoid", "silu"))


def norm_backend(x: Tensor, backend: BackendLike, argument: str = "backend") -> Backend:
    """The backend for a gated norm; `argument`: what the caller knows `backend` by."""
    request = Request("norm", Device.of(x.device), x.dtype, key_dim=x.shape[2], value_dim=x.shape[2])
    return resolved(request, backend, env.DECODE_BACKEND, argument)


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    *,
    activation: Literal["sigmoid", "silu"] = "sigmoid",
    segments: Segments | None = None,
    out: Tensor | None = None,
    backend: BackendLike = None,
) -> Tensor:
    """Per-head RMSNorm with an output gate: x * rsqrt(mean x^2 + eps) * weight * activation(z).

    Args:
        x, z: [T, H, D], bfloat16, float16 or float32, last dimension dense. A row [D] of x that is zero, as those of
            padding rows are, gives zeros whatever z holds there.
        weight: [D], any of those dtypes.
        eps: added under the root, positive.
        activation: "sigmoid" (KDA) or "silu".
        segments: whose tokens are normed; None: all tokens.
        out: [T, H, D], dtype of x; x itself, or a tensor that shares no memory with it.

    Returns:
        `out`.
    """
    in_place = out is x  # told apart by the kind: guards of torch take no tensor twice
    key, kind, given = kinds.find(
        "norm",
        backend,
        env.DECODE_BACKEND,
        segments,
        None,
        (x, z, weight, None if in_place else out),
        (eps, activation, in_place),
    )
    if kind is None:
        check_norm(x, z, weight, eps, activation)
        if segments is not None:
            segments = bind_requests.segment_table(segments, x.shape[0], x.device)
        if out is not None:
            bind.output(out, tuple(x.shape), "[T, H, D]", x, (z,))
            bind.same_or_apart(out, x)
        covered = segments is None or bind.covers(segments, x.shape[0])
        kind = kinds.Kind(norm_backend(x, backend), covered=covered)
        if out is not None:
            kind.memo["norm"] = -bind.span(out), bind.span(x)  # where an output that starts so far past x may meet it
        kind = kinds.keep(key, kind)
    elif out is not None:
        before, after = kind.memo["norm"]
        if not in_place and before < out.data_ptr() - x.data_ptr() < after:
            bind.same_or_apart(out, x)
        if kind.repeats(given, segments, None):
            return out
        bind.apart(out, (z,))
    if out is None:
        out = bind.new_output(x, kind.covered)
    call = NormCall(x, z, weight, float(eps), activation, out, segments)
    call.memo = kind.memo
    kind.backend.norm(call)
    kind.learn(call.repeat, given, segments, None, out, (z,))
    return out
