"""A KDA layer's computation as one operator of torch, so that `torch.compile` keeps it inside its graph.

The compiler sees tensors in, tensors out and a state that is written in place; what lies between (tables of segments,
the choice of a backend, compiled kernels) runs as always.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .core import Parameters, infer
from .rows import TokenRows, token_rows


class _TensorCache:
    """A layer's cache as the two tensors that the operator was given."""

    def __init__(self, window: Tensor | None, state: Tensor | None):
        self.window = window
        self.state = state
        self.filled = window is not None
        self.moved: Tensor  # the window after this pass

    @property
    def exists(self) -> bool:
        return self.state is not None

    def history(self, entries: int) -> Tensor | None:
        return None if self.window is None else self.window[..., -entries:]

    def recurrent_state(self) -> Tensor | None:
        return self.state

    def store_recurrent(self, state: Tensor) -> None:
        raise RuntimeError("the state of a compiled layer is written in place")

    def store_inputs(self, rows: TokenRows, qkv: Tensor, width: int) -> None:
        newest = rows.newest(qkv, self.window, width)  # fewer than width entries if the pass was shorter
        before = newest.new_zeros(*newest.shape[:2], width) if self.window is None else self.window
        self.moved = torch.cat([before, newest], dim=-1)[..., -width:].contiguous()


# It reads a mask back and builds tables: CUDA graphs leave it out, where this torch can say so.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))


@torch.library.custom_op("rapidkda::transformers_layer", mutates_args=("state",), tags=_TAGS)
def layer(
    qkv: Tensor,
    forget: Tensor,
    beta: Tensor,
    z: Tensor,
    conv: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    attention_mask: Tensor | None,
    window: Tensor | None,
    state: Tensor | None,
    activation: str,
    lower_bound: float | None,
    epsilon: float,
    norm_activation: str,
    prefill_backend: str | None,
    decode_backend: str | None,
) -> tuple[Tensor, Tensor]:
    """One layer on a batch of B rows of T tokens, C = 3 * H * K.

    Args:
        qkv, forget, beta, z: [B, T, C], [B, T, H, K], [B, T, H], [B, T, H, K], as in `core.infer`.
        attention_mask: [B, T], nonzero where a token is real; None without padding.
        window: [B, C, W], the newest inputs of the convolution before these; None before the first token.
        state: [B, H, K, V] float32, written in place; zeros before the first token; None without a cache.

    Returns:
        Outputs [B, T, H, K], zero at padding, and the newest inputs [B, C, W] after these.
    """
    rows = token_rows(qkv, attention_mask)
    cache = _TensorCache(window, state)
    parameters = Parameters(
        head_dim=forget.shape[-1],
        conv=conv,
        conv_bias=conv_bias,
        activation=activation,  # type: ignore[arg-type]  # an operator's schema knows strings only
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        norm=norm,
        epsilon=epsilon,
        norm_activation=norm_activation,  # type: ignore[arg-type]
        prefill_backend=prefill_backend,
        decode_backend=decode_backend,
    )
    packed = [rows.pack(x.flatten(2)).unflatten(-1, x.shape[2:]) for x in (qkv, forget, beta, z)]
    y = infer(parameters, rows, cache, *packed)
    out = rows.unpack(y.flatten(1)).view_as(forget)
    return out, cache.moved


@layer.register_fake
def _layer_shapes(
    qkv: Tensor, forget: Tensor, beta: Tensor, z: Tensor, conv: Tensor, *rest: object, **options: object
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(forget, memory_format=torch.contiguous_format), qkv.new_empty(
        qkv.shape[0], qkv.shape[2], conv.shape[1]
    )
