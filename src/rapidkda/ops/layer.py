"""A prefill together with its neighbours in a layer: the causal convolution before it and the gated norm after it.

Where the backend of the prefill does one of them itself, what lies between the two never reaches memory; a neighbour
that it does not do runs as the operator of its own that it is. The results are the same to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from .. import checks, env
from ..backends.base import Backend, FusingBackend
from ..dispatch import Choice, check_name
from ..problem import FusedConv, FusedNorm, PrefillCall
from ..segments import Checkpoints, Segments
from . import bind, kinds
from .choose import BackendLike, choose, workspace_needed
from .neighbours import causal_conv, check_conv, check_norm, conv_backend, gated_rms_norm, norm_backend
from .steps import check_prefill


def prefill_layer(
    x: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Segments,
    heads: int | None = None,
    conv_weight: Tensor | None = None,
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_activation: Literal["sigmoid", "silu"] = "sigmoid",
    state: Tensor | None = None,
    conv_state: Tensor | None = None,
    slots: Tensor | None = None,
    read_slots: Tensor | None = None,
    conv_read_slots: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    accepted: Tensor | None = None,
    channels_last: bool = False,
    conv_out: Tensor | None = None,
    out: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    allow_neg_eigval: bool = False,
    state_v_first: bool = True,
    pad_slot: int = -1,
    checkpoints: Checkpoints | None = None,
    checkpoint_pool: Tensor | None = None,
    conv_checkpoint_pool: Tensor | None = None,
    workspace: Tensor | None = None,
    fuse: bool = True,
    backend: BackendLike = None,
    neighbour_backend: BackendLike = None,
) -> Tensor:
    """Convolution with SiLU, prefill and gated norm of the segments of a step; each neighbour is optional.

    The same as `causal_conv` of x, `prefill` of its parts, and `gated_rms_norm` of the segments' rows, with fewer trips
    to memory where the backend of the prefill takes its neighbours on.

    Args:
        x: [T, C], C = 2 H K + HV V: q | k | v side by side, before the convolution; without `conv_weight`, after it.
        g: [T, HV, K]; beta: [T, HV]. As in `prefill`, raw.
        heads: H; default HV.
        conv_weight: [C, W]; None: no convolution.
        z, norm_weight: [T, HV, V] and [V]; None, both of them: no norm.
        norm_eps, norm_activation: as in `gated_rms_norm`.
        state, slots, read_slots, has_initial_state, checkpoints, checkpoint_pool, workspace: as in `prefill`.
        conv_state, channels_last, accepted: as in `causal_conv`, histories at `conv_read_slots` (default `slots`), left
            at `slots`. The slots of both pools must agree on which segments are padding.
        conv_out: [T, C], dtype of x: scratch for a convolution that runs by itself; default: allocated then.
        out: [T, HV, V], dtype of x; default newly allocated, with zeros in rows that no segment covers.
        conv_checkpoint_pool: histories to export with the checkpoints.
        fuse: False: every neighbour runs by itself.
        backend: of the prefill; neighbour_backend: of a neighbour that runs by itself, as in `causal_conv`.

    Returns:
        `out`; rows that no segment covers are left alone, those of padding segments are zero.

    Raises what the three operators raise, under the names of these arguments, before anything is written.
    """
    inputs = (x, g, beta, state, z, conv_out)
    options = (lower_bound, scale, True, True, True, allow_neg_eigval)
    within = (checkpoint_pool is state, conv_checkpoint_pool is conv_state)  # as in `prefill`
    exported = (None if within[0] else checkpoint_pool, None if within[1] else conv_checkpoint_pool)
    key, kind, given = kinds.find(
        "prefill_layer",
        backend,
        env.PREFILL_BACKEND,
        segments,
        checkpoints,
        (
            *(*inputs, conv_weight, norm_weight, conv_state, slots, read_slots, conv_read_slots, has_initial_state),
            *(accepted, out, A_log, dt_bias, *exported, workspace),
        ),
        (
            *(*options, heads, norm_eps, norm_activation, channels_last, state_v_first, pad_slot, fuse),
            *within,
            neighbour_backend.name if isinstance(neighbour_backend, Choice) else neighbour_backend,
        ),
    )
    known = kind is not None
    keeps, exports = conv_state is not None, conv_checkpoint_pool is not None  # histories
    if kind is None:
        parts = _parts(x, g, heads)
        terms, tokens, segments, pad_slot, has_initial_state, checkpoints = check_prefill(
            (*_split(x, parts), g, beta, A_log, dt_bias, *options),
            segments,
            state,
            slots,
            read_slots,
            has_initial_state,
            state_v_first,
            pad_slot,
            checkpoints,
            checkpoint_pool,
        )
        if conv_weight is not None:
            check_conv(
                x,
                conv_weight,
                None,
                segments,
                conv_state,
                slots if keeps else None,
                conv_read_slots,
                has_initial_state if keeps else None,
                accepted,
                False,
                "silu",
                channels_last,
                pad_slot,
                checkpoints if exports else None,
                conv_checkpoint_pool,
                prefix="conv_",
            )
        _check_absent(
            "conv_weight" if conv_weight is None else None,
            conv_state=conv_state,
            conv_read_slots=conv_read_slots,
            accepted=accepted,
            conv_out=conv_out,
            conv_checkpoint_pool=conv_checkpoint_pool,
        )
        _check_absent("z" if z is None else None, norm_weight=norm_weight)
        if z is not None:
            names = ("norm_weight", "norm_eps", "norm_activation")
            check_norm(tokens.v, z, norm_weight, norm_eps, norm_activation, names)  # type: ignore[arg-type]
        if conv_out is not None:
            checks.tensor("conv_out", conv_out)
            checks.shape("conv_out", conv_out, tuple(x.shape), "[T, C]")
            checks.dtype("conv_out", conv_out, (x.dtype,))
            checks.same_device("conv_out", conv_out, x.device)
            checks.dense_last("conv_out", conv_out)
        if out is not None:
            bind.output(out, tuple(tokens.v.shape), "[T, HV, V]", x, inputs)
        chosen = choose("prefill", tokens, state, backend, checkpoints is not None)
        bind.workspace(workspace, workspace_needed(chosen, "prefill", tokens, segments), x.device)
        kind = kinds.Kind(chosen, terms, bind.covers(segments, tokens.count), {"layer": _Layer(parts)})
    else:
        if out is not None:
            if kind.repeats(given, segments, checkpoints):
                return out
            bind.apart(out, inputs)
        if workspace is not None:
            bind.aligned(workspace)
    layer: _Layer = kind.memo["layer"]
    if out is None:
        out = bind.new_output(_split(x, layer.parts)[2], kind.covered)
    call = PrefillCall(
        tokens=kind.tokens(*_split(x, layer.parts), g, beta, A_log, dt_bias),
        segments=segments,
        out=out,
        initial=state,
        final=state,
        read_slots=slots if read_slots is None else read_slots,
        write_slots=slots,
        has_initial_state=has_initial_state,
        state_v_first=state_v_first,
        pad_slot=pad_slot,
        checkpoints=checkpoints,
        checkpoint_pool=checkpoint_pool,
        workspace=workspace,
    )
    if conv_weight is not None:
        read = slots if conv_read_slots is None else conv_read_slots
        call.conv = FusedConv(x, conv_weight, conv_state, channels_last, read, accepted, conv_checkpoint_pool)
    if z is not None and norm_weight is not None:
        call.norm = FusedNorm(z, norm_weight, float(norm_eps), norm_activation)
    if not known:
        layer.alone = _alone(kind.backend, call, checks.boolean("fuse", fuse))
        layer.resolve(call, neighbour_backend)
        kind = kinds.keep(key, kind)
    elif layer.alone and neighbour_backend is None and env.backend_name(env.DECODE_BACKEND) != layer.named:
        layer.resolve(call, None)
    call.memo = kind.memo
    if "conv" in layer.alone and conv_weight is not None:
        mixed = causal_conv(
            x,
            conv_weight,
            segments=segments,
            state=conv_state,
            slots=slots if keeps else None,
            read_slots=conv_read_slots,
            has_initial_state=has_initial_state if keeps else None,
            accepted=accepted,
            channels_last=channels_last,
            out=conv_out,
            pad_slot=pad_slot,
            checkpoints=checkpoints if exports else None,
            checkpoint_pool=conv_checkpoint_pool,
            backend=neighbour_backend,
        )
        call.tokens.q, call.tokens.k, call.tokens.v = _split(mixed, layer.parts)
        call.conv = None
    if "norm" in layer.alone:
        call.norm = None
    kind.backend.prefill(call)
    if not layer.alone:
        views = call.tokens.q, call.tokens.k, call.tokens.v
        kind.learn(call.repeat, given, segments, checkpoints, out, inputs, workspace, views)
    if "norm" in layer.alone and z is not None and norm_weight is not None:
        gated_rms_norm(
            out,
            z,
            norm_weight,
            norm_eps,
            activation=norm_activation,
            segments=segments,
            out=out,
            backend=neighbour_backend,
        )
    return out


@dataclass(slots=True, eq=False)
class _Layer:
    """What layer calls of a kind share.

    Attributes:
        parts: H, K, HV, V.
        alone: which neighbours run by themselves, with the reasons.
        named: the backend of those that the environment named when it was last found that they can run.
    """

    parts: tuple[int, int, int, int]
    alone: dict[str, list[str]] = field(default_factory=dict)
    named: str | None = None

    def resolve(self, call: PrefillCall, backend: BackendLike) -> None:
        """Make sure that what runs by itself can, before the first launch of a call writes states."""
        name = "neighbour_backend"
        if backend is not None and not isinstance(backend, Choice):
            check_name(backend, name)
        if "conv" in self.alone and call.conv is not None:
            conv_backend(call.conv.x, call.conv.pool, backend, name)
        if "norm" in self.alone and call.norm is not None:
            norm_backend(call.out, backend, name)
        self.named = env.backend_name(env.DECODE_BACKEND)


def _parts(x: Any, g: Any, heads: Any) -> tuple[int, int, int, int]:
    """H, K, HV and V; x and g are checked as far as that takes."""
    for name, value, shape in (("x", x, "[T, C]"), ("g", g, "[T, HV, K]")):
        if checks.tensor(name, value).ndim != shape.count(",") + 1:
            raise ValueError(f"{name} must have shape {shape}, got {list(value.shape)}")
    checks.dtype("x", x, checks.FLOATS)
    checks.dense_last("x", x)
    value_heads, key_dim = g.shape[1:]
    if heads is None:
        heads = value_heads
    elif checks.integer("heads", heads, 1) and value_heads % heads:
        raise ValueError(f"heads must divide the {value_heads} heads of g, got {heads}")
    rest = x.shape[1] - 2 * heads * key_dim
    if value_heads == 0 or rest <= 0 or rest % value_heads:
        raise ValueError(f"x must have 2 * {heads} * {key_dim} + {value_heads} * V channels, got {x.shape[1]}")
    return heads, key_dim, value_heads, rest // value_heads


def _split(x: Tensor, parts: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views."""
    heads, key_dim, value_heads, value_dim = parts
    count = x.shape[0]
    q, k, v = x.split_with_sizes([heads * key_dim, heads * key_dim, value_heads * value_dim], 1)
    return (
        q.view(count, heads, key_dim),
        k.view(count, heads, key_dim),
        v.view(count, value_heads, value_dim),
    )


def _check_absent(missing: str | None, **given: Tensor | None) -> None:
    """What means nothing without the argument `missing`."""
    for name, value in given.items():
        if missing is not None and value is not None:
            raise ValueError(f"{name} must be None without {missing}, got a tensor")


def _alone(backend: Backend, call: PrefillCall, fuse: bool) -> dict[str, list[str]]:
    """The neighbours of a call that its backend does not take on, with its reasons."""
    if fuse and isinstance(backend, FusingBackend):
        return backend.unfused(call)
    reason = [f"the {backend.name} backend fuses no neighbours" if fuse else "fuse is False"]
    return dict.fromkeys(("conv", "norm"), reason)
