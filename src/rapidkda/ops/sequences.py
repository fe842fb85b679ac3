"""KDA over whole sequences, with the signatures that users of flash-linear-attention 0.6 know.

States go in and come out as tensors; autograd works where a backend differentiates.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .. import checks, env
from ..backends.base import DifferentiableBackend
from ..problem import DecodeCall, PrefillCall, Tokens
from ..segments import Checkpoints, Segments
from . import bind, bind_requests, kinds, tables
from .choose import BackendLike, choose

Flat = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g and beta on one token axis
Parameters = tuple[Tensor | None, Tensor | None]  # A_log and dt_bias


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: BackendLike = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Chunked KDA over whole sequences, with the call signature of flash-linear-attention 0.6.

    Args:
        q, k: [B, T, H, K], bfloat16, float16 or float32.
        v: [B, T, HV, V], dtype of q; HV is a multiple of H and value head j reads q/k head j // (HV // H).
        g: [B, T, HV, K], dtype of q or float32: log decay (natural log, <= 0; a debug run checks it), or raw gate
            logits with `use_gate_in_kernel`.
        beta: [B, T, HV], dtype of q or float32: write strength, or its logits with `use_beta_sigmoid_in_kernel`.
        scale: multiplies q; default K ** -0.5.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with `state_v_first`), float32 or bfloat16; N = B, or the number
            of packed sequences. It is not modified.
        output_final_state: also return the final state, in the dtype of `initial_state` (float32 without one).
        use_qk_l2norm_in_kernel: normalise q and k by rsqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: g = lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) when `lower_bound` is given, else
            -exp(A_log) * softplus(g + dt_bias).
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta); doubled with `allow_neg_eigval`.
        safe_gate: the gate is bounded; with `use_gate_in_kernel` it requires `lower_bound`. Every backend is exact
            with or without it.
        lower_bound: in [-5, 0).
        disable_recompute: accepted for compatibility; autograd keeps what it needs either way.
        return_intermediate_states: also return the states at the start of every `chunk_size` tokens of each sequence,
            [B, NT, HV, K, V] in the dtype of k (V-first with `state_v_first`); inference only.
        cu_seqlens: int32 or int64 [N + 1] on q's device: sequences packed along T, with B = 1. Its values are read
            once a call unless `cu_seqlens_cpu` is given.
        cu_seqlens_cpu: the same values on the host; no device-to-host copy happens then.
        cp_context: must be None (context parallelism across GPUs belongs to the engine).
        use_graph, max_num_seqs: accepted for compatibility; `max_num_seqs` must match `cu_seqlens` when given.
        A_log: [HV] or [1, 1, HV, 1]; optional with `lower_bound`.
        dt_bias: [HV, K] or [HV * K].
        chunk_size: 32 or 64, the tokens between intermediate states; backends choose their own chunks.
        transpose_state_layout: older name of `state_v_first`.
        backend: see the module's docstring.

    Returns:
        (o [B, T, HV, V], final_state or None), and the intermediate states when asked for.
    """
    state_v_first = _state_layout(state_v_first, transpose_state_layout)
    _check_compatibility(safe_gate, use_gate_in_kernel, lower_bound, cp_context, chunk_size, disable_recompute)
    sequences = _Sequences.bind(q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu)
    if checks.boolean("use_graph", use_graph) and max_num_seqs is not None:
        checks.integer("max_num_seqs", max_num_seqs, 1)
        if cu_seqlens is not None and max_num_seqs != sequences.segments.count:
            raise ValueError(
                f"max_num_seqs must be the {sequences.segments.count} sequences of cu_seqlens, got {max_num_seqs}"
            )
    options = (
        lower_bound,
        scale,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    return _whole_sequences(
        sequences,
        (A_log, dt_bias),
        options,
        initial_state,
        checks.boolean("output_final_state", output_final_state),
        chunk_size if checks.boolean("return_intermediate_states", return_intermediate_states) else None,
        state_v_first,
        backend,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    backend: BackendLike = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA for short sequences, with the call signature of flash-linear-attention 0.6.

    Arguments and results are those of `chunk_kda`; the two differ in speed only. One-token sequences take the decode
    kernel.
    """
    state_v_first = _state_layout(state_v_first, transpose_state_layout)
    sequences = _Sequences.bind(q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu)
    options = (
        lower_bound,
        scale,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    keep_final = checks.boolean("output_final_state", output_final_state)
    gate = (A_log, dt_bias)
    if sequences.segments.max_length <= 1 and not _wants_grad(sequences.flat, gate, initial_state):
        return _one_token_sequences(sequences, gate, options, initial_state, keep_final, state_v_first, backend)
    out, final, *_ = _whole_sequences(sequences, gate, options, initial_state, keep_final, None, state_v_first, backend)
    return out, final


class _Sequences:
    """Batched [B, T, ...] or packed [1, T, ...] arguments as one token axis and its segments."""

    def __init__(self, flat: Flat, segments: Segments, batch_shape: tuple[int, int]):
        self.flat = flat
        self.segments = segments
        self.batch_shape = batch_shape

    @staticmethod
    def bind(
        q: Any, k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
    ) -> _Sequences:
        leading = None
        for name, value, ndim in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, 4), ("beta", beta, 3)):
            shape = checks.tensor(name, value).shape
            if len(shape) != ndim:
                raise ValueError(f"{name} must have {ndim} dimensions [B, T, ...], got shape {list(shape)}")
            leading = shape[:2] if leading is None else leading
            if shape[:2] != leading:
                raise ValueError(f"{name} must start with [B, T] = {list(leading)} like q, got {list(shape)}")
        batch, length = q.shape[:2]
        if cu_seqlens is not None:
            if batch != 1:
                raise ValueError(f"cu_seqlens needs packed sequences with B = 1, got q with B = {batch}")
            segments = bind_requests.cu_seqlens_segments(cu_seqlens, cu_seqlens_cpu, length, q.device)
        elif cu_seqlens_cpu is not None:
            raise ValueError("cu_seqlens_cpu must be None without cu_seqlens, got a tensor")
        else:
            segments = tables.equal(batch, length, q.device)
        # flatten() is a view for one sequence and for dense batches; a batch of strided slices is copied once
        q, k, v, g, beta = [_dense_last(x.flatten(0, 1)) for x in (q, k, v, g, beta)]
        return _Sequences((q, k, v, g, beta), segments, (batch, length))


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _whole_sequences(
    sequences: _Sequences,
    gate: Parameters,
    options: tuple[Any, ...],
    initial: Tensor | None,
    keep_final: bool,
    intermediate_tokens: int | None,
    state_v_first: bool,
    backend: BackendLike,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """`options` are the plain arguments that `bind.terms` takes last."""
    segments, flat = sequences.segments, sequences.flat
    if _wants_grad(flat, gate, initial):
        return _differentiated(
            sequences, gate, options, initial, keep_final, intermediate_tokens, state_v_first, backend
        )
    initial = _dense_slots(initial)
    key, kind, _ = kinds.find(
        "sequences",
        backend,
        env.PREFILL_BACKEND,
        segments,
        None,
        (*flat, *gate, initial),
        (*options, keep_final, intermediate_tokens, state_v_first),
    )
    if kind is None:
        terms = bind.terms(*flat, *gate, *options)
        tokens = terms.tokens(*flat, *gate)
        bind_requests.sequences_of_prefill("cu_seqlens" if sequences.batch_shape[0] == 1 else "q", segments.count)
        bind.gate_values(tokens, segments)
        _check_initial_state(initial, tokens, segments, state_v_first)
        chosen = choose("prefill", tokens, initial, backend, intermediate_tokens is not None)
        kind = kinds.keep(key, kinds.Kind(chosen, terms, bind.covers(segments, tokens.count)))
    else:
        tokens = kind.tokens(*flat, *gate)
    out = bind.new_output(tokens.v, kind.covered)
    final = _state_like(tokens, segments.count, initial, state_v_first) if keep_final else None
    checkpoints, intermediate = None, None
    if intermediate_tokens is not None:
        checkpoints, intermediate = _intermediate_states(tokens, segments, initial, state_v_first, intermediate_tokens)
    call = PrefillCall(
        tokens=tokens,
        segments=segments,
        out=out,
        initial=initial,
        final=final,
        read_slots=None,
        write_slots=None,
        has_initial_state=None,
        state_v_first=state_v_first,
        pad_slot=-1,
        checkpoints=checkpoints,
        checkpoint_pool=intermediate,
        workspace=None,
    )
    call.memo = kind.memo
    kind.backend.prefill(call)
    shaped = out.view(*sequences.batch_shape, *out.shape[1:])
    if intermediate is None or intermediate_tokens is None:
        return shaped, final
    batch, length = sequences.batch_shape
    count = intermediate.shape[0] if batch == 1 else -(-length // intermediate_tokens)
    return shaped, final, intermediate.to(tokens.k.dtype).unflatten(0, (batch, count))


def _differentiated(
    sequences: _Sequences,
    gate: Parameters,
    options: tuple[Any, ...],
    initial: Tensor | None,
    keep_final: bool,
    intermediate_tokens: int | None,
    state_v_first: bool,
    backend: BackendLike,
) -> tuple[Tensor, Tensor | None]:
    """The same where autograd records; arguments as in `_whole_sequences`."""
    segments = sequences.segments
    tokens = bind.terms(*sequences.flat, *gate, *options).tokens(*sequences.flat, *gate)
    bind.gate_values(tokens, segments)
    initial = _dense_slots(initial)
    _check_initial_state(initial, tokens, segments, state_v_first)
    if intermediate_tokens is not None:
        raise ValueError("return_intermediate_states must be False where gradients are needed, got True")
    chosen = choose("prefill", tokens, initial, backend, requires_grad=True)
    if not isinstance(chosen, DifferentiableBackend):
        raise TypeError(f"backend {chosen.name!r} says that it differentiates, but has no forward()")
    outputs, states = chosen.forward(tokens, segments, initial, state_v_first)
    return outputs.unflatten(0, sequences.batch_shape), states if keep_final else None


def _one_token_sequences(
    sequences: _Sequences,
    gate: Parameters,
    options: tuple[Any, ...],
    initial: Tensor | None,
    keep_final: bool,
    state_v_first: bool,
    backend: BackendLike,
) -> tuple[Tensor, Tensor | None]:
    segments, flat = sequences.segments, sequences.flat
    initial = _dense_slots(initial)
    key, kind, _ = kinds.find(
        "one-token sequences",
        backend,
        env.DECODE_BACKEND,
        segments,
        None,
        (*flat, *gate, initial),
        (*options, keep_final, state_v_first),
    )
    if kind is None:
        terms = bind.terms(*flat, *gate, *options)
        tokens = terms.tokens(*flat, *gate)
        bind.gate_values(tokens, segments)
        _check_initial_state(initial, tokens, segments, state_v_first)
        pool = _state_like(tokens, segments.count, initial, state_v_first)
        chosen = choose("decode", tokens, pool, backend)
        kind = kinds.keep(key, kinds.Kind(chosen, terms, bind.covers(segments, tokens.count)))
    else:
        tokens = kind.tokens(*flat, *gate)
        pool = _state_like(tokens, segments.count, initial, state_v_first)
    _ = pool.zero_() if initial is None else pool.copy_(initial)  # the caller's state is not modified
    out = bind.new_output(tokens.v, kind.covered)
    rows = tables.equal(segments.count, 1, pool.device).first_token  # 0, 1, ...
    call = DecodeCall(tokens, segments, out, pool, rows, rows, state_v_first, -1)
    call.memo = kind.memo
    kind.backend.decode(call)
    return out.view(*sequences.batch_shape, *out.shape[1:]), pool if keep_final else None


def _dense_slots(initial: Any) -> Any:
    """An initial state with dense slots: it is read only, so a copy loses nothing."""
    if isinstance(initial, Tensor) and initial.ndim == 4 and not initial.is_contiguous():
        return initial if initial[:1].is_contiguous() else initial.contiguous()
    return initial


def _check_initial_state(initial: Tensor | None, tokens: Tokens, segments: Segments, state_v_first: bool) -> None:
    if initial is not None:
        bind_requests.pool("initial_state", initial, tokens, state_v_first, rows=segments.count, written=False)


def _state_like(tokens: Tokens, rows: int, initial: Tensor | None, state_v_first: bool) -> Tensor:
    inner = (tokens.value_dim, tokens.key_dim) if state_v_first else (tokens.key_dim, tokens.value_dim)
    dtype = torch.float32 if initial is None else initial.dtype
    return torch.empty((rows, tokens.value_heads, *inner), dtype=dtype, device=tokens.q.device)


def _intermediate_states(
    tokens: Tokens, segments: Segments, initial: Tensor | None, state_v_first: bool, interval: int
) -> tuple[Checkpoints, Tensor]:
    """A checkpoint at the start of every `interval` tokens; the first of each sequence is its initial state."""
    entries: list[tuple[int, int, int]] = []
    starts: list[int] = []
    rows = 0
    for n, length in enumerate(segments.host_values()[1].tolist()):
        if length:
            starts.append(rows)
            chunks = range(interval, length, interval)
            entries += [(n, offset, rows + 1 + i) for i, offset in enumerate(chunks)]
            rows += 1 + len(chunks)
        else:
            starts.append(-1)
    inner = (tokens.value_dim, tokens.key_dim) if state_v_first else (tokens.key_dim, tokens.value_dim)
    dtype = torch.bfloat16 if tokens.k.dtype == torch.bfloat16 else torch.float32
    states = torch.zeros((rows, tokens.value_heads, *inner), dtype=dtype, device=tokens.q.device)
    if initial is not None:
        live = [n for n, row in enumerate(starts) if row >= 0]
        states[[starts[n] for n in live]] = initial[live].to(dtype)
    return Checkpoints.build(entries, segments.count, states.device), states


def _wants_grad(flat: Flat, gate: Parameters, initial: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(x, Tensor) and x.requires_grad for x in (*flat, *gate, initial))


def _state_layout(state_v_first: Any, transpose_state_layout: Any) -> bool:
    checks.boolean("state_v_first", state_v_first)
    if transpose_state_layout is None:
        return bool(state_v_first)
    if state_v_first:
        raise ValueError("transpose_state_layout is the older name of state_v_first; give one of them, got both")
    warnings.warn("transpose_state_layout is the older name of state_v_first", DeprecationWarning, stacklevel=3)
    return checks.boolean("transpose_state_layout", transpose_state_layout)


def _check_compatibility(
    safe_gate: Any, use_gate: Any, lower_bound: Any, cp_context: Any, chunk_size: Any, disable_recompute: Any
) -> None:
    if checks.boolean("safe_gate", safe_gate) and use_gate and lower_bound is None:
        raise ValueError("lower_bound must be given when safe_gate and use_gate_in_kernel are True, got None")
    if cp_context is not None:
        raise ValueError(f"cp_context must be None (no context parallelism), got {type(cp_context).__name__}")
    checks.choice("chunk_size", chunk_size, (32, 64))
    checks.boolean("disable_recompute", disable_recompute)
