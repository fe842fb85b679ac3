"""Calls of flash-linear-attention's KDA operators in rapidkda's terms: what declines, and how the rest is passed on.

fla's versions 0.5 and 0.6 differ in the order of parameters and in a few names; arguments arrive here by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...backends.base import Request
from ...device import Device
from ...env import DECODE_BACKEND, PREFILL_BACKEND
from ...errors import BackendUnavailable
from ...ops.choose import BackendLike, resolved
from ...problem import Op

# Options that rapidkda takes under the same name and with the same meaning in both operators.
SHARED = (
    "scale",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "lower_bound",
    "state_v_first",
    "cu_seqlens",
    "cu_seqlens_cpu",
    "initial_state",
)
INPUTS = ("q", "k", "v", "g", "beta")
GATE = ("A_log", "dt_bias")
CHUNK_ONLY = ("safe_gate", "disable_recompute", "return_intermediate_states", "chunk_size")
# Only with their neutral values: rapidkda has no such option in these operators.
CHUNK_NEUTRAL: dict[str, Any] = {"cp_context": None, "use_graph": False}
RECURRENT_NEUTRAL: dict[str, Any] = {
    "inplace_final_state": False,
    "ssm_state_indices": None,
    "num_accepted_tokens": None,
    "out": None,
}
IGNORED = ("max_num_seqs",)  # means something together with use_graph only
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_VALUE_DIM = 256


def canonical(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, extra keywords beside the named ones, the layout under its present name."""
    named = {name: value for name, value in arguments.items() if name != "kwargs"}
    named.update(arguments.get("kwargs", {}))
    if named.pop("transpose_state_layout", False):
        named["state_v_first"] = True
    return named


def decline_chunk(call: dict[str, Any], backend: BackendLike) -> str | None:
    """Why rapidkda does not take a call of chunk_kda; None if it does."""
    return _decline(call, {*SHARED, *CHUNK_ONLY, *IGNORED}, CHUNK_NEUTRAL) or _unavailable(call, backend, "prefill")


def decline_recurrent(call: dict[str, Any], backend: BackendLike) -> str | None:
    """Why rapidkda does not take a call of the recurrent forward; None if it does."""
    reason = _decline(call, set(SHARED), RECURRENT_NEUTRAL)
    if reason is not None:
        return reason
    one_token = call["q"].shape[1] == 1
    return _unavailable(call, backend, "decode") if one_token else _unavailable(call, backend, "prefill")


def _decline(call: dict[str, Any], options: set[str], neutral: dict[str, Any]) -> str | None:
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call.values()):
        return "rapidkda serves inference here; an argument requires a gradient"
    unknown = sorted(set(call) - options - set(neutral) - {*INPUTS, *GATE})
    if unknown:
        return f"rapidkda does not know the options {', '.join(unknown)}"
    for name, value in neutral.items():
        if call.get(name, value) is not value:
            return f"rapidkda does not take {name} here"
    q, k, v, g, beta = (call[name] for name in INPUTS)
    if q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        return (
            f"rapidkda takes q, k and v of one dtype (bfloat16, float16, float32), got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    for name, x in (("g", g), ("beta", beta)):
        if x.dtype not in (q.dtype, torch.float32):
            return f"rapidkda takes {name} as {q.dtype} or float32, got {x.dtype}"
    if beta.ndim != 3:
        return f"rapidkda takes beta of shape [B, T, HV], got {list(beta.shape)}"
    if v.shape[-1] > MAX_VALUE_DIM:
        return f"rapidkda takes value dims up to {MAX_VALUE_DIM}, got {v.shape[-1]}"
    bound = call.get("lower_bound")
    if call.get("use_gate_in_kernel") and bound is not None and not -5.0 <= bound < 0.0:
        return f"rapidkda takes a lower_bound in [-5, 0), got {bound}"
    return None


def _unavailable(call: dict[str, Any], backend: BackendLike, op: Op) -> str | None:
    q, v = call["q"], call["v"]
    request = Request(
        op=op,
        device=Device.of(q.device),
        dtype=q.dtype,
        key_dim=q.shape[-1],
        value_dim=v.shape[-1],
        gate=_gate(call),
        grouped_values=v.shape[2] > q.shape[2],
        checkpoints=bool(call.get("return_intermediate_states")),
    )
    try:
        resolved(request, backend, PREFILL_BACKEND if op == "prefill" else DECODE_BACKEND)
    except BackendUnavailable as reason:
        return str(reason)
    return None


def _gate(call: dict[str, Any]) -> Any:
    if not call.get("use_gate_in_kernel"):
        return "log_decay"
    return "softplus" if call.get("lower_bound") is None else "bounded"


def _options(call: dict[str, Any], names: tuple[str, ...], backend: BackendLike) -> dict[str, Any]:
    options = {name: call[name] for name in names if name in call}
    if call.get("use_gate_in_kernel"):
        options.update({name: call.get(name) for name in GATE})
    else:
        options["lower_bound"] = None  # fla ignores it then
    initial = options.get("initial_state")
    if initial is not None and initial.dtype != torch.float32:
        options["initial_state"] = initial.float()  # fla's final states are float32 whatever the initial ones are
    return {**{name: call[name] for name in INPUTS}, **options, "backend": backend}


def chunk(call: dict[str, Any], backend: BackendLike) -> Any:
    """fla's chunk_kda on rapidkda: (o, final_state) and, when asked for, the intermediate states."""
    options = _options(call, (*SHARED, *CHUNK_ONLY), backend)
    return ops.chunk_kda(**options)


def recurrent(call: dict[str, Any], backend: BackendLike) -> tuple[Tensor, Tensor | None]:
    """fla's recurrent forward on rapidkda: (o, final_state)."""
    return ops.fused_recurrent_kda(**_options(call, SHARED, backend))
