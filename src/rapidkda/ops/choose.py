"""Which backend serves a call of the front door, and what scratch it needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks, env
from ..backends.base import Backend, Request
from ..device import Device
from ..dispatch import AUTO, Choice, as_device, check_name, resolve_cached
from ..problem import OPS, Op, Rollback, Sizes, Tokens
from ..segments import Segments

# A name, a choice made earlier, or None: the environment variable, else `auto`.
BackendLike = str | Choice | None


def choose(
    op: Op,
    tokens: Tokens,
    pool: Tensor | None,
    backend: BackendLike,
    checkpoints: bool = False,
    requires_grad: bool = False,
    rollback: Rollback = "replay",
    deferred: bool = False,
    state_v_first: bool = True,
    records: int | None = None,
    most_tokens: int | None = None,
) -> Backend:
    """The backend for a KDA call on these tokens and this state pool."""
    request = Request(
        op=op,
        device=Device.of(tokens.q.device),
        dtype=tokens.q.dtype,
        key_dim=tokens.key_dim,
        value_dim=tokens.value_dim,
        gate=tokens.gate.kind,
        state_dtype=torch.float32 if pool is None else pool.dtype,
        grouped_values=tokens.value_heads > tokens.heads,
        requires_grad=requires_grad,
        checkpoints=checkpoints,
        gate_dtype=tokens.g.dtype,
        beta_dtype=tokens.beta.dtype,
        raw_keys=tokens.l2norm,
        raw_beta=tokens.beta_logits,
        neg_eigval=tokens.beta_scale != 1.0,
        rollback=rollback,
        deferred=deferred,
        state_v_first=state_v_first,
        records=records,
        most_tokens=most_tokens,
    )
    return resolved(request, backend, _variable(op))


def _variable(op: Op) -> str:
    """The environment variable that names the backend of an operator."""
    return env.PREFILL_BACKEND if op == "prefill" else env.DECODE_BACKEND


def resolved(request: Request, backend: BackendLike, variable: str, argument: str = "backend") -> Backend:
    """The backend for a request; `variable` is the environment variable that stands in for a missing name, `argument`
    what the caller knows `backend` by."""
    if isinstance(backend, Choice):  # still asked whether it can, once a kind of request: a choice is no promise
        return resolve_cached(request, backend.name, "", argument).backend
    if backend is not None:
        return resolve_cached(request, check_name(backend, argument), "", argument).backend
    wanted = env.backend_name(variable)
    if wanted is None:
        return resolve_cached(request, AUTO, "").backend
    return resolve_cached(request, check_name(wanted, f"environment variable {variable}"), variable).backend


def workspace_needed(chosen: Backend, op: Op, tokens: Tokens, segments: Segments) -> int:
    """Scratch bytes of one call."""
    return chosen.workspace_bytes(
        op,
        Sizes(
            tokens=tokens.count,
            segments=segments.count,
            heads=tokens.heads,
            value_heads=tokens.value_heads,
            key_dim=tokens.key_dim,
            value_dim=tokens.value_dim,
            dtype=tokens.q.dtype,
        ),
    )


def workspace_bytes(op: Op, sizes: Sizes, *, backend: BackendLike = None, device: Any = None) -> int:
    """Bytes of scratch that `op` needs within `sizes` on the backend that would serve it (see `prefill`)."""
    checks.choice("op", op, OPS)
    if not isinstance(sizes, Sizes):
        raise TypeError(f"sizes must be a rapidkda.Sizes, got {type(sizes).__name__}")
    request = Request(
        op,
        as_device(device),
        sizes.dtype,
        sizes.key_dim,
        sizes.value_dim,
        grouped_values=sizes.value_heads > sizes.heads,
    )
    return resolved(request, backend, _variable(op)).workspace_bytes(op, sizes)
