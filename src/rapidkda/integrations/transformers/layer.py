"""One KDA layer of a transformers model, computed by rapidkda.

`KdaLayer.forward` stands in for the `forward` of one module. It calls the module's own projections (they may be
quantised or carry adapters), and reads and writes the model's own cache in its own layout. Convolution, KDA and the
output norm run through `rapidkda.ops`: packed and in place in `core`, as one operator of a compiled graph in
`compiled`, or out of place for training, here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from . import compiled
from .core import Parameters, infer, windowed_conv
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
        cache_params = cache if cache_params is None else cache_params
        cu_seqlens = kwargs.get("cu_seqlens")
        if cu_seqlens is None:
            cu_seqlens = kwargs.get("cu_seq_lens_q")
        if (
            torch.compiler.is_compiling()
            and cu_seqlens is None
            and not self._trains(hidden_states)
            and not self._hooked
        ):
            return self._compiled(hidden_states, cache_params, attention_mask)
        out: Tensor = self._eager(hidden_states, cache_params, attention_mask, cu_seqlens)
        return out

    def _trains(self, hidden_states: Tensor) -> bool:
        if not torch.is_grad_enabled():
            return False
        return hidden_states.requires_grad or any(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def _hooked(self) -> bool:
        """Whether parameters that are read directly wait for offloading hooks."""
        module = self.module
        return any(hasattr(part, "_hf_hook") for part in (module.conv1d, module.forget_gate, module.o_norm))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _eager(
        self, hidden_states: Tensor, cache_params: Any, attention_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """On the packed tokens of the batch; projections see no padding."""
        module = self.module
        if cu_seqlens is not None and cache_params is not None:
            raise ValueError("cu_seqlens must be None with a cache: pass use_cache=False, or a padded batch")
        rows = token_rows(hidden_states, attention_mask, cu_seqlens)
        layer_cache = _LayerCache(cache_params, module.layer_idx)
        with _weights_loaded(module.conv1d, module.forget_gate, module.o_norm):
            inputs = self._project(rows.pack(hidden_states))
            if self._trains(inputs[0]):
                y = self._differentiable(rows, layer_cache, *inputs)
            else:
                parameters = Parameters.of(module, self.prefill_backend, self.decode_backend)
                y = infer(parameters, rows, layer_cache, *inputs)
            return rows.unpack(module.o_proj(y.flatten(1)))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [..., D] to q | k | v [..., 3 * H * K], gate logits [..., H, K], beta logits [..., H], z [..., H, K]."""
        module = self.module
        qkv = torch.cat([module.q_proj(x), module.k_proj(x), module.v_proj(x)], dim=-1)
        forget = module.forget_gate.f_b_proj(module.forget_gate.f_a_proj(x)).unflatten(-1, (-1, module.head_dim))
        z = module.g_b_proj(module.g_a_proj(x)).unflatten(-1, (-1, module.head_dim))
        return qkv, forget, module.b_proj(x), z

    def _compiled(self, hidden_states: Tensor, cache_params: Any, attention_mask: Tensor | None) -> Tensor:
        """The same on the whole batch, as the compiler's graph sees it: one operator between the projections."""
        module = self.module
        qkv, forget, beta, z = self._project(hidden_states)
        cache = _LayerCache(cache_params, module.layer_idx)
        width = module.conv1d.weight.shape[-1]
        state = cache.recurrent_state()
        if cache.exists and state is None:
            state = forget.new_zeros(forget.shape[0], *forget.shape[2:], forget.shape[-1], dtype=torch.float32)
        parameters = Parameters.of(module, self.prefill_backend, self.decode_backend)
        y, window = compiled.layer(
            qkv,
            forget,
            beta,
            z,
            parameters.conv,
            parameters.conv_bias,
            parameters.A_log,
            parameters.dt_bias,
            parameters.norm,
            attention_mask,
            cache.history(width),
            state,
            parameters.activation,
            parameters.lower_bound,
            parameters.epsilon,
            parameters.norm_activation,
            parameters.prefill_backend,
            parameters.decode_backend,
        )
        if cache.exists:
            if state is not None and not cache.filled:
                cache.store_recurrent(state)
            cache_params.update_conv_state(window, module.layer_idx, conv_kernel_size=width)
        out: Tensor = module.o_proj(y.flatten(2))
        return out

    def _differentiable(
        self, rows: TokenRows, cache: _LayerCache, qkv: Tensor, forget: Tensor, beta: Tensor, z: Tensor
    ) -> Tensor:
        """Out of place, so that autograd can follow."""
        module = self.module
        conv = windowed_conv(module.conv1d.weight.squeeze(1), module.conv1d.bias, rows, cache, qkv)
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
            **Parameters.of(module, self.prefill_backend, self.decode_backend).gate,
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
