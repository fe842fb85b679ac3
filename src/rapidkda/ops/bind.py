"""From raw arguments to validated parts of a call. Everything that can be wrong with a call is found here, once, on
the host, before any backend is touched and before anything is written: operands and outputs here, tables and pools in
bind_requests.py. Used by `rapidkda.ops` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import checks, env
from ..problem import Gate, GateKind, Tokens
from ..segments import Segments

MAX_DIM = 256

Inputs = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """What the plain arguments of a KDA call say about its tokens."""

    gate: GateKind
    lower_bound: float | None
    beta_logits: bool
    beta_scale: float
    l2norm: bool
    scale: float
    ready: bool  # the gate's parameters are dense float32 in their flat shapes

    def tokens(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
    ) -> Tokens:
        """Checked tensors as the token-axis inputs of a call."""
        if not self.ready:
            A_log = A_log if A_log is None else A_log.reshape(g.shape[1:2]).float().contiguous()
            dt_bias = dt_bias if dt_bias is None else dt_bias.reshape(g.shape[1:]).float().contiguous()
        return Tokens(
            q,
            k,
            v,
            g,
            beta,
            Gate(self.gate, self.lower_bound, A_log, dt_bias),
            self.beta_logits,
            self.beta_scale,
            self.l2norm,
            self.scale,
        )


def terms(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    scale: Any,
    use_qk_l2norm_in_kernel: Any,
    use_gate_in_kernel: Any,
    use_beta_sigmoid_in_kernel: Any,
    allow_neg_eigval: Any,
) -> Terms:
    """Check the token-axis inputs: q, k [T, H, K]; v [T, HV, V]; g [T, HV, K]; beta [T, HV]."""
    for name, value in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        checks.tensor(name, value)
    if q.ndim != 3:
        raise ValueError(f"q must have shape [T, H, K], got {list(q.shape)}")
    count, heads, key_dim = q.shape
    checks.dtype("q", q, checks.FLOATS)
    checks.shape("k", k, (count, heads, key_dim), "[T, H, K]")
    checks.dtype("k", k, (q.dtype,))
    checks.shape("v", v, (count, None, None), "[T, HV, V]")
    checks.dtype("v", v, (q.dtype,))
    value_heads, value_dim = v.shape[1:]
    for name, dim in (("q", key_dim), ("v", value_dim)):
        if not 0 < dim <= MAX_DIM:
            raise ValueError(f"{name} must have a head dim of 1 to {MAX_DIM}, got {dim}")
    if heads == 0 or value_heads == 0 or value_heads % heads:
        raise ValueError(f"v must have a multiple of q's {heads} heads, got {value_heads}")
    checks.shape("g", g, (count, value_heads, key_dim), "[T, HV, K]")
    checks.dtype("g", g, (q.dtype, torch.float32))
    checks.shape("beta", beta, (count, value_heads), "[T, HV]")
    checks.dtype("beta", beta, (q.dtype, torch.float32))
    for name, value in (("q", q), ("k", k), ("v", v), ("g", g)):
        checks.dense_last(name, value)
    for name, value in (("k", k), ("v", v), ("g", g), ("beta", beta)):
        checks.same_device(name, value, q.device)
    beta_logits = checks.boolean("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel)
    if checks.boolean("allow_neg_eigval", allow_neg_eigval) and not beta_logits:
        raise ValueError("allow_neg_eigval must be False unless use_beta_sigmoid_in_kernel is True, got True")
    kind, bound = _gate(
        checks.boolean("use_gate_in_kernel", use_gate_in_kernel), A_log, dt_bias, lower_bound, value_heads, g
    )
    return Terms(
        gate=kind,
        lower_bound=bound,
        beta_logits=beta_logits,
        beta_scale=2.0 if allow_neg_eigval else 1.0,
        l2norm=checks.boolean("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        scale=key_dim**-0.5 if scale is None else checks.finite("scale", scale),
        ready=_is_dense(A_log, (value_heads,)) and _is_dense(dt_bias, (value_heads, key_dim)),
    )


def _gate(
    use_gate: bool, A_log: Any, dt_bias: Any, lower_bound: Any, value_heads: int, g: Tensor
) -> tuple[GateKind, float | None]:
    """Check the gate's parameters; returns its kind and floor."""
    if not use_gate:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
            if value is not None:
                raise ValueError(f"{name} must be None unless use_gate_in_kernel is True, got a value")
        if lower_bound is not None:  # how g was made: nothing here depends on it
            checks.finite("lower_bound", lower_bound)
        return "log_decay", None
    if lower_bound is not None:
        lower_bound = checks.lower_bound(lower_bound)
    elif A_log is None:
        raise ValueError("A_log must be given when use_gate_in_kernel is True and lower_bound is None, got None")
    key_dim = g.shape[-1]
    if A_log is not None:
        checks.tensor("A_log", A_log)
        if A_log.shape not in ((value_heads,), (1, 1, value_heads, 1)):
            raise ValueError(f"A_log must have shape [HV] = [{value_heads}] or [1, 1, HV, 1], got {list(A_log.shape)}")
        _parameter("A_log", A_log, g.device)
    if dt_bias is not None:
        checks.tensor("dt_bias", dt_bias)
        if dt_bias.shape not in ((value_heads, key_dim), (value_heads * key_dim,)):
            raise ValueError(
                f"dt_bias must have shape [HV, K] = [{value_heads}, {key_dim}] or flat [{value_heads * key_dim}], "
                f"got {list(dt_bias.shape)}"
            )
        _parameter("dt_bias", dt_bias, g.device)
    return "softplus" if lower_bound is None else "bounded", lower_bound


def _parameter(name: str, value: Tensor, device: torch.device) -> None:
    checks.same_device(name, value, device)
    checks.dtype(name, value, checks.FLOATS)


def _is_dense(parameter: Tensor | None, shape: tuple[int, ...]) -> bool:
    if parameter is None:
        return True
    return parameter.dtype is torch.float32 and parameter.shape == shape and parameter.is_contiguous()


def gate_values(tokens: Tokens, segments: Segments) -> None:
    """Debug mode only: a log decay given by the caller is never above 0 (a state that grows soon overflows)."""
    if tokens.gate.kind != "log_decay" or not env.check_device_values():
        return
    first, length = segments.host_values()
    for start, count in zip(first.tolist(), length.tolist(), strict=True):
        here = tokens.g[start : start + count]
        if (here > 0).any():
            raise ValueError(f"g must be a log decay of at most 0, got {float(here.nan_to_num(0.0).max()):g}")


def output(value: Tensor, shape: tuple[int, ...], meaning: str, like: Tensor, inputs: Inputs) -> None:
    """Check an output that the caller gives. `inputs` are the tensors that it must not be."""
    checks.tensor("out", value)
    checks.dtype("out", value, (like.dtype,))
    checks.shape("out", value, shape, meaning)
    checks.same_device("out", value, like.device)
    checks.dense_last("out", value)
    checks.no_self_overlap("out", value)
    apart(value, inputs)
    if env.check_device_values() and any(x is not None and checks.share_memory(value, x) for x in inputs):
        raise ValueError("out must not lie in the memory of an input, got a tensor that shares some of it")


def apart(out: Tensor, inputs: Inputs) -> None:
    """Check that an output is none of the inputs. What no metadata says, so known kinds of calls pass here too."""
    if out.data_ptr() in [x.data_ptr() for x in inputs if x is not None] and out.numel():
        raise ValueError("out must not be one of the inputs, got a tensor that starts at the same address")


def span(value: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    steps = [(extent - 1) * stride for extent, stride in zip(value.shape, value.stride(), strict=True)]
    return (sum(steps) + 1) * value.element_size() if value.numel() else 0


def same_or_apart(out: Tensor, x: Tensor) -> None:
    """Check that an output of x's shape and dtype lies where x lies, element for element, or in none of its memory."""
    past = out.data_ptr() - x.data_ptr()
    steps = zip(x.shape, out.stride(), x.stride(), strict=True)
    if past == 0 and all(a == b for extent, a, b in steps if extent > 1):
        return
    if checks.share_memory(out, x):
        raise ValueError(
            f"out must be x itself or share no memory with it, got a tensor that starts {past} bytes past x, with "
            f"strides {list(out.stride())} beside {list(x.stride())}"
        )


def new_output(like: Tensor, covered: bool) -> Tensor:
    """Allocate an output. Rows that no segment covers are zero."""
    return (torch.empty if covered else torch.zeros)(like.shape, dtype=like.dtype, device=like.device)


def covers(segments: Segments, tokens: int) -> bool:
    """True when the host knows that the segments cover all tokens (they are disjoint)."""
    return segments.total == tokens


def workspace(value: object, needed: int, device: torch.device) -> Tensor | None:
    """Check a workspace: uint8, dense, 256-byte aligned, at least `needed` bytes."""
    if value is None:
        return None
    value = checks.tensor("workspace", value)
    checks.dtype("workspace", value, (torch.uint8,))
    checks.shape("workspace", value, (None,), "[bytes]")
    checks.same_device("workspace", value, device)
    if value.shape[0] < needed:
        raise ValueError(f"workspace must have at least {needed} bytes for this call, got {value.shape[0]}")
    checks.dense_inner("workspace", value, leading=0)
    aligned(value)
    return value


def aligned(workspace: Tensor) -> None:
    """Check a workspace's address."""
    past = workspace.data_ptr() % 256
    if past:
        raise ValueError(f"workspace must be 256-byte aligned, got an address that is {past} past")
