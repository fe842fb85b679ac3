"""One KDA layer of a transformers model, computed by rapidkda.

`KdaLayer.forward` stands in for the `forward` of one module. It calls the module's own projections (they may be
quantised or carry adapters), reads and writes the model's own cache in its own layout, and runs the convolution, KDA
and the output norm through `rapidkda.ops`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from .rows import TokenRows, token_rows


class KdaLayer:
    """The replacement of one module's forward.

    Attributes:
        module: `Glm5NextTextLinearAttention` or `KimiLinearDeltaAttention`.
        prefill_backend, decode_backend: backend names, or None for the environment variables and then `auto`.
        previous: the instance attribute that this replaced, or None where the class's forward was in force.
    """

    def __init__(self, module: Any, prefill_backend: str | None, decode_backend: str | None, previous: Any):
        self.module = module
        self.prefill_backend = prefill_backend
        self.decode_backend = decode_backend
        self.previous = previous

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        *,
        cache: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states [B, T, D] to [B, T, D]; the arguments of the module's own forward.

        `cache` is what newer releases of transformers call `cache_params`. `kwargs` are those that the model hands to
        all of its layers. Only the boundaries of packed sequences concern this one: `cu_seqlens`, or `cu_seq_lens_q`
        as transformers' collators call it.
        """
        module = self.module
        cache_params = cache if cache_params is None else cache_params
        cu_seqlens = kwargs.get("cu_seqlens")
        if cu_seqlens is None:
            cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is not None and cache_params is not None:
            raise ValueError("cu_seqlens must be None with a cache: pass use_cache=False, or a padded batch")
        rows = token_rows(hidden_states, attention_mask, cu_seqlens)
        layer_cache = _LayerCache(cache_params, module.layer_idx)
        with _weights_loaded(module.conv1d, module.forget_gate, module.o_norm):
            x = rows.pack(hidden_states)  # [n, D]
            qkv = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], dim=-1)  # [n, 3 * H * K]
            forget = module.forget_gate.f_b_proj(module.forget_gate.f_a_proj(x)).unflatten(-1, (-1, module.head_dim))
            beta = module.b_proj(x)  # [n, H]
            z = module.g_b_proj(module.g_a_proj(x)).unflatten(-1, (-1, module.head_dim))  # [n, H, K]
            trains = torch.is_grad_enabled() and (
                x.requires_grad or any(parameter.requires_grad for parameter in module.parameters())
            )
            run = self._differentiable if trains else self._inference
            y = run(rows, layer_cache, qkv, forget, beta, z)  # [n, H, K]
            return rows.unpack(module.o_proj(y.flatten(1)))

    def _inference(
        self, rows: TokenRows, cache: _LayerCache, qkv: Tensor, forget: Tensor, beta: Tensor, z: Tensor
    ) -> Tensor:
        """In place on the cache's states, on the fastest backends."""
        module = self.module
        if cache.filled and rows.segments.max_length <= 1:
            conv = _windowed_conv(module.conv1d, rows, cache, qkv)  # one token: cheaper than to set up a kernel
        else:
            weight = module.conv1d.weight.squeeze(1)  # [C, W]
            history = cache.history(weight.shape[1] - 1)
            conv = ops.causal_conv(
                qkv,
                weight,
                module.conv1d.bias,
                segments=rows.segments,
                state=None if history is None else history.contiguous(),  # a copy: the cache's window is wider
                slots=None if history is None else rows.slots,
                activation=module.activation,
                backend=self.decode_backend,
            )
        q, k, v = (part.unflatten(-1, (-1, module.head_dim)) for part in conv.chunk(3, dim=-1))
        options = {**_gate(module), "segments": rows.segments, "state_v_first": False}
        state = cache.recurrent_state()
        if not cache.exists:
            y = ops.prefill(q, k, v, forget, beta, backend=self.prefill_backend, **options)
        elif state is None:
            shape = (rows.batch, q.shape[1], q.shape[2], v.shape[2])
            state = torch.zeros(shape, dtype=torch.float32, device=q.device)
            y = ops.prefill(
                q, k, v, forget, beta, state=state, slots=rows.slots, backend=self.prefill_backend, **options
            )
            cache.store_recurrent(state)
        else:
            one_token = rows.segments.max_length <= 1
            op, backend = (ops.decode, self.decode_backend) if one_token else (ops.prefill, self.prefill_backend)
            y = op(q, k, v, forget, beta, state=state, slots=rows.slots, backend=backend, **options)
        cache.store_inputs(rows, qkv, module.conv1d.weight.shape[-1])
        norm = module.o_norm
        return ops.gated_rms_norm(
            y, z, norm.weight, norm.variance_epsilon, activation=norm.activation, backend=self.decode_backend
        )

    def _differentiable(
        self, rows: TokenRows, cache: _LayerCache, qkv: Tensor, forget: Tensor, beta: Tensor, z: Tensor
    ) -> Tensor:
        """Out of place, so that autograd can follow."""
        module = self.module
        conv = _windowed_conv(module.conv1d, rows, cache, qkv)
        q, k, v = (part.unflatten(-1, (-1, module.head_dim))[None] for part in conv.chunk(3, dim=-1))
        y, final, *_ = ops.chunk_kda(
            q,
            k,
            v,
            forget[None],
            beta[None],
            initial_state=cache.recurrent_state(),
            output_final_state=cache.exists,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=rows.cu_seqlens,
            cu_seqlens_cpu=rows.cu_seqlens_cpu,
            backend=self.prefill_backend,
            **_gate(module),
        )
        if final is not None:
            cache.store_recurrent(final)
        cache.store_inputs(rows, qkv, module.conv1d.weight.shape[-1])
        normed: Tensor = module.o_norm(y[0], z)
        return normed


class _LayerCache:
    """One layer's part of a transformers cache, which may be absent.

    Layouts are transformers': convolution inputs [B, 3 * H * K, W], oldest first, of which the last W - 1 matter; the
    recurrent state [B, H, K, V], float32.
    """

    def __init__(self, cache: Any, layer_idx: int):
        self.cache = cache
        self.layer_idx = layer_idx
        self.filled = cache is not None and cache.has_previous_state(layer_idx)

    @property
    def exists(self) -> bool:
        return self.cache is not None

    def history(self, entries: int) -> Tensor | None:
        """The newest inputs [B, C, entries], or None before the first token."""
        if not self.filled:
            return None
        states: Tensor = self.cache.layers[self.layer_idx].conv_states[0]
        return states[..., -entries:]

    def recurrent_state(self) -> Tensor | None:
        """The state itself [B, H, K, V], or None before the first token."""
        if not self.filled:
            return None
        state: Tensor = self.cache.layers[self.layer_idx].recurrent_states[0]
        return state

    def store_recurrent(self, state: Tensor) -> None:
        self.cache.update_recurrent_state(state.to(torch.float32), self.layer_idx)

    def store_inputs(self, rows: TokenRows, qkv: Tensor, width: int) -> None:
        """Move the convolution's window on by the tokens of this pass."""
        if self.cache is not None:
            newest = rows.newest(qkv, self.history(width), width)
            self.cache.update_conv_state(newest, self.layer_idx, conv_kernel_size=width)


def _windowed_conv(conv1d: Any, rows: TokenRows, cache: _LayerCache, x: Tensor) -> Tensor:
    """The causal convolution of x [n, C] with SiLU, out of place, by each token's window of inputs."""
    weight = conv1d.weight.squeeze(1)  # [C, W]
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    windows = rows.windows(x, cache.history(weight.shape[1] - 1), weight.shape[1])  # [n, C, W]
    y = (windows.to(weight.dtype) * weight).sum(-1)
    if conv1d.bias is not None:
        y = y + conv1d.bias
    return nn.functional.silu(y).to(x.dtype)


def _gate(module: Any) -> dict[str, Any]:
    forget_gate = module.forget_gate
    return {
        "A_log": forget_gate.A_log,
        "dt_bias": forget_gate.dt_bias,
        "lower_bound": getattr(forget_gate, "safe_gate_lower_bound", None),
    }


@contextmanager
def _weights_loaded(*modules: nn.Module) -> Iterator[None]:
    """Fire the offloading hooks of modules whose parameters are read directly and not through their forward."""
    hooked = [(module, hook) for module in modules if (hook := getattr(module, "_hf_hook", None)) is not None]
    for module, hook in hooked:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for module, hook in reversed(hooked):
            hook.post_forward(module, ())
