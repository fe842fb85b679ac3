"""The part of a KDA layer that rapidkda computes in inference: convolution, KDA and output norm, on packed tokens.

It reads and writes a cache in transformers' layouts: convolution inputs [B, 3 * H * K, W], oldest first, of which the
last W - 1 matter; the recurrent state [B, H, K, V], float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ... import ops
from .rows import TokenRows


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """What a layer's computation needs beside its inputs.

    Attributes:
        conv, conv_bias: [3 * H * K, W], [3 * H * K] or None.
        A_log, dt_bias, lower_bound: of the gate; lower_bound is None for the unbounded one.
        norm, epsilon, norm_activation: of the gated output norm, [K].
        prefill_backend, decode_backend: names, or None for the environment variables and then `auto`.
    """

    head_dim: int
    conv: Tensor
    conv_bias: Tensor | None
    activation: Literal["silu"]
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    norm: Tensor
    epsilon: float
    norm_activation: Literal["sigmoid", "silu"]
    prefill_backend: str | None
    decode_backend: str | None

    @classmethod
    def of(cls, module: Any, prefill_backend: str | None, decode_backend: str | None) -> Parameters:
        """Those of a `Glm5NextTextLinearAttention` or `KimiLinearDeltaAttention`."""
        gate, norm = module.forget_gate, module.o_norm
        return cls(
            head_dim=module.head_dim,
            conv=module.conv1d.weight.squeeze(1),
            conv_bias=module.conv1d.bias,
            activation=module.activation,
            A_log=gate.A_log,
            dt_bias=gate.dt_bias,
            lower_bound=getattr(gate, "safe_gate_lower_bound", None),
            norm=norm.weight,
            epsilon=norm.variance_epsilon,
            norm_activation=norm.activation,
            prefill_backend=prefill_backend,
            decode_backend=decode_backend,
        )

    @property
    def gate(self) -> dict[str, Any]:
        return {"A_log": self.A_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound}


class LayerCache(Protocol):
    """One layer's part of a cache, which may be absent."""

    filled: bool  # tokens have gone before

    @property
    def exists(self) -> bool: ...

    def history(self, entries: int) -> Tensor | None:
        """The newest inputs [B, C, entries], or None before the first token."""

    def recurrent_state(self) -> Tensor | None:
        """The state itself [B, H, K, V], or None before the first token."""

    def store_recurrent(self, state: Tensor) -> None: ...

    def store_inputs(self, rows: TokenRows, qkv: Tensor, width: int) -> None:
        """Move the convolution's window on by the tokens of this pass."""


def infer(
    parameters: Parameters, rows: TokenRows, cache: LayerCache, qkv: Tensor, forget: Tensor, beta: Tensor, z: Tensor
) -> Tensor:
    """In place on the cache's states, on the fastest backends. n real tokens, C = 3 * H * K.

    Args:
        qkv: [n, C] before the convolution.
        forget: [n, H, K] gate logits.
        beta: [n, H] logits.
        z: [n, H, K] logits of the output gate.

    Returns:
        [n, H, K].
    """
    if cache.filled and rows.segments.max_length <= 1:
        # One token: cheaper than to set up a kernel.
        conv = windowed_conv(parameters.conv, parameters.conv_bias, rows, cache, qkv)
    else:
        history = cache.history(parameters.conv.shape[1] - 1)
        conv = ops.causal_conv(
            qkv,
            parameters.conv,
            parameters.conv_bias,
            segments=rows.segments,
            state=None if history is None else history.contiguous(),  # a copy: the cache's window is wider
            slots=None if history is None else rows.slots,
            activation=parameters.activation,
            backend=parameters.decode_backend,
        )
    q, k, v = (part.unflatten(-1, (-1, parameters.head_dim)) for part in conv.chunk(3, dim=-1))
    options = {**parameters.gate, "segments": rows.segments, "state_v_first": False}
    state = cache.recurrent_state()
    if not cache.exists:
        y = ops.prefill(q, k, v, forget, beta, backend=parameters.prefill_backend, **options)
    elif state is None:
        shape = (rows.batch, q.shape[1], q.shape[2], v.shape[2])
        state = torch.zeros(shape, dtype=torch.float32, device=q.device)
        y = ops.prefill(
            q, k, v, forget, beta, state=state, slots=rows.slots, backend=parameters.prefill_backend, **options
        )
        cache.store_recurrent(state)
    else:
        one_token = rows.segments.max_length <= 1
        op = ops.decode if one_token else ops.prefill
        backend = parameters.decode_backend if one_token else parameters.prefill_backend
        y = op(q, k, v, forget, beta, state=state, slots=rows.slots, backend=backend, **options)
    cache.store_inputs(rows, qkv, parameters.conv.shape[1])
    return ops.gated_rms_norm(
        y,
        z,
        parameters.norm,
        parameters.epsilon,
        activation=parameters.norm_activation,
        backend=parameters.decode_backend,
    )


def windowed_conv(weight: Tensor, bias: Tensor | None, rows: TokenRows, cache: LayerCache, x: Tensor) -> Tensor:
    """The causal convolution of x [n, C] by weight [C, W] with SiLU, out of place, by each token's window of inputs."""
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    windows = rows.windows(x, cache.history(weight.shape[1] - 1), weight.shape[1])  # [n, C, W]
    y = (windows.to(weight.dtype) * weight).sum(-1)
    if bias is not None:
        y = y + bias
    return nn.functional.silu(y).to(x.dtype)
