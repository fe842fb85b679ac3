"""Adapter to FlashKDA, the fused CUDA prefill that vLLM ships (`vllm._flashkda_C`) or that stands alone (`flash_kda`).

The extension takes one packed run of dense tensors and states by sequence, so the adapter copies what is strided,
gathers the segments' tokens and states, and scatters the results: that is its cost beside the other backends.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..problem import CommitCall, ConvCall, DecodeCall, NormCall, Op, PrefillCall, Sizes, Tokens, VerifyCall
from ..segments import Segments
from .base import Request
from .torch import pools

HEAD_DIM = 128
CAPABILITY_MAJORS = (9, 10, 12)


@dataclass(frozen=True)
class Extension:
    """The two entry points. `forward` takes q, k, v, g, beta, scale, out, workspace, A_log, dt_bias, lower_bound,
    initial state, final state, cumulative lengths; `workspace_bytes` takes tokens, heads, sequences.
    """

    forward: Callable[..., None]
    workspace_bytes: Callable[[int, int, int], int]


def missing_package() -> str | None:
    """Why there can be no extension, without importing anything; None where a package is there to try."""
    if hasattr(torch.ops._flashkda_C, "fwd") or any(importlib.util.find_spec(name) for name in ("vllm", "flash_kda")):
        return None
    return "no FlashKDA extension is installed (vllm with vllm._flashkda_C, or flash_kda)"


def find_extension() -> Extension | str:
    """The extension, or why there is none. vLLM's is an operator library; the package of its own allocates scratch."""
    missing = missing_package()
    if missing is not None:
        return missing
    if not hasattr(torch.ops._flashkda_C, "fwd") and importlib.util.find_spec("vllm") is not None:
        try:
            importlib.import_module("vllm._flashkda_C")
        except (ImportError, OSError, RuntimeError) as error:
            return f"vllm._flashkda_C cannot be imported: {error}"
    if hasattr(torch.ops._flashkda_C, "fwd"):
        library = torch.ops._flashkda_C
        return Extension(lambda *arguments: library.fwd(*arguments, None, None), library.get_workspace_size)
    if importlib.util.find_spec("flash_kda") is None:
        return "vllm has no vllm._flashkda_C.fwd, and flash_kda is not installed"
    try:
        package: Any = importlib.import_module("flash_kda")
    except (ImportError, OSError, RuntimeError) as error:
        return f"flash_kda cannot be imported: {error}"

    def forward(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, out: Tensor, *rest: Any
    ) -> None:
        _, A_log, dt_bias, lower_bound, initial, final, ends = rest
        package.fwd(
            q,
            k,
            v,
            g,
            beta,
            scale,
            out,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            initial_state=initial,
            final_state=final,
            cu_seqlens=ends,
        )

    return Extension(forward, lambda tokens, heads, sequences: 0)


class FlashKdaBackend:
    """FlashKDA behind the backend contract. Prefill only."""

    name = "flashkda"

    def unmet(self, request: Request) -> list[str]:
        if request.op != "prefill":
            return [f"FlashKDA has prefill only, not {request.op}"]
        reasons = []
        capability = request.device.capability
        if request.device.vendor != "nvidia" or capability is None:
            reasons.append(f"needs an NVIDIA GPU, got {request.device}")
        elif capability[0] not in CAPABILITY_MAJORS:
            majors = ", ".join(map(str, CAPABILITY_MAJORS))
            reasons.append(f"needs compute capability {majors}, got {capability[0]}.{capability[1]}")
        for name, dtype in (("q", request.dtype), ("g", request.gate_dtype), ("beta", request.beta_dtype)):
            if dtype not in (None, torch.bfloat16):
                reasons.append(f"{name} must be bfloat16, got {str(dtype).removeprefix('torch.')}")
        if (request.key_dim, request.value_dim) != (HEAD_DIM, HEAD_DIM):
            reasons.append(f"head dims must be {HEAD_DIM}, got K = {request.key_dim} and V = {request.value_dim}")
        if request.gate != "bounded":
            reasons.append(f"the gate must be bounded (lower_bound given), got {request.gate}")
        if request.state_dtype not in (torch.float32, torch.bfloat16):
            reasons.append(f"states must be float32 or bfloat16, got {str(request.state_dtype).removeprefix('torch.')}")
        if request.grouped_values:
            reasons.append("value heads must be as many as key heads, got more")
        if request.requires_grad:
            reasons.append("has no gradient")
        if request.checkpoints:
            reasons.append("exports no checkpoints")
        if not request.raw_keys:
            reasons.append("normalises q and k itself, got use_qk_l2norm_in_kernel=False")
        if not request.raw_beta:
            reasons.append("takes the logits of beta, got use_beta_sigmoid_in_kernel=False")
        if request.neg_eigval:
            reasons.append("has no allow_neg_eigval")
        # importing vllm is slow and may fail on a machine without its GPU, so it is only tried on one
        missing = find_extension() if capability is not None else missing_package()
        if isinstance(missing, str):
            reasons.append(missing)
        return reasons

    def workspace_bytes(self, op: Op, sizes: Sizes) -> int:
        """Scratch of the extension; the adapter's own copies come from torch's allocator."""
        if op != "prefill":
            return 0
        return int(_extension().workspace_bytes(sizes.tokens, sizes.heads, sizes.segments))

    def prefill(self, call: PrefillCall) -> None:
        tokens, segments = call.tokens, call.segments
        _, length = segments.host_values()
        rows = np.flatnonzero(length)  # the extension sees no empty sequence
        real = _real(call)
        states = _initial_states(call, real)
        if len(rows):
            active = None if len(rows) == segments.count else _to(rows, tokens.q.device)
            final = _run(call, rows, states if active is None else states.index_select(0, active), real)
            states = final if active is None else states.index_copy_(0, active, final)
        if call.final is not None:
            slots = call.write_slots
            if slots is None:
                slots = torch.arange(segments.count, device=tokens.q.device)
            values = states if call.state_v_first else states.transpose(-1, -2)
            pools.write_rows(call.final, slots, values, real)

    def decode(self, call: DecodeCall) -> None:
        raise NotImplementedError("FlashKDA has prefill only")

    def verify(self, call: VerifyCall) -> None:
        raise NotImplementedError("FlashKDA has prefill only")

    def commit(self, call: CommitCall) -> None:
        raise NotImplementedError("FlashKDA has prefill only")

    def conv(self, call: ConvCall) -> None:
        raise NotImplementedError("FlashKDA has prefill only")

    def norm(self, call: NormCall) -> None:
        raise NotImplementedError("FlashKDA has prefill only")


def _extension() -> Extension:
    found = find_extension()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


_captured: list[Tensor] = []  # tables that a captured graph reads at every replay: they stay for good


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    table = _table(array.tobytes(), array.dtype.str, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.append(table)
    return table


@functools.lru_cache(maxsize=64)
def _table(content: bytes, dtype: str, device: torch.device) -> Tensor:
    """Kept by content, which is always right: calls that repeat copy nothing, so they can be captured in a graph."""
    return torch.from_numpy(np.frombuffer(content, dtype).copy()).to(device)


def _real(call: PrefillCall) -> Tensor:
    """Rows that are no padding: bool [N]."""
    real = torch.ones(call.segments.count, dtype=torch.bool, device=call.tokens.q.device)
    for slots, pool in ((call.read_slots, call.initial), (call.write_slots, call.final)):
        if slots is not None and pool is not None:
            real &= pools.usable(slots, pool.shape[0], call.pad_slot)
    return real


def _initial_states(call: PrefillCall, real: Tensor) -> Tensor:
    """What each segment starts from [N, HV, V, K]: selected, so that stale rows may hold anything."""
    tokens, pool = call.tokens, call.initial
    if pool is None:
        dtype = torch.float32 if call.final is None else call.final.dtype
        shape = (call.segments.count, tokens.value_heads, tokens.value_dim, tokens.key_dim)
        return torch.zeros(shape, dtype=dtype, device=tokens.q.device)
    starts = real if call.has_initial_state is None else real & call.has_initial_state.bool()
    slots = call.read_slots
    if slots is None:
        slots = torch.arange(call.segments.count, device=tokens.q.device)
    states = pools.read_rows(pool, slots, starts)
    states = torch.where(starts[:, None, None, None], states, 0.0)
    return (states if call.state_v_first else states.transpose(-1, -2)).contiguous()


def _run(call: PrefillCall, rows: np.ndarray, initial: Tensor, real: Tensor) -> Tensor:
    """Outputs of the segments `rows` into `call.out`; returns their last states [n, HV, V, K]."""
    tokens, segments = call.tokens, call.segments
    device, extension = tokens.q.device, _extension()
    first, length = (x[rows] for x in segments.host_values())
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(length)])
    count = int(ends[-1])
    packed = np.array_equal(first[1:], first[:-1] + length[:-1])
    span = slice(int(first[0]), int(first[0]) + count)
    index = None if packed else _to(np.repeat(first - ends[:-1], length) + np.arange(count), device)

    def take(x: Tensor) -> Tensor:
        return (x[span] if index is None else x.index_select(0, index)).contiguous().unsqueeze(0)

    target = call.out[span] if index is None and call.out[span].is_contiguous() else None
    out = torch.empty(count, *call.out.shape[1:], dtype=call.out.dtype, device=device) if target is None else target
    needed = extension.workspace_bytes(count, tokens.heads, len(rows))
    workspace = call.workspace
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.uint8, device=device)
    final = torch.empty_like(initial)
    extension.forward(
        *(take(x) for x in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)),
        tokens.scale,
        out.unsqueeze(0),
        workspace,
        *_gate_parameters(tokens),
        tokens.gate.lower_bound,
        initial,
        final,
        _to(ends, device),
    )
    if call.read_slots is not None or call.write_slots is not None:
        _zero_padding(out, real, segments, rows, count)
    if target is None:
        _ = call.out[span].copy_(out) if index is None else call.out.index_copy_(0, index, out)
    return final


def _gate_parameters(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """A_log [HV] and dt_bias [HV, K], zeros where absent: amplitude 1 and no bias."""
    gate, device = tokens.gate, tokens.q.device
    A_log = torch.zeros(tokens.value_heads, device=device) if gate.A_log is None else gate.A_log
    shape = (tokens.value_heads, tokens.key_dim)
    return A_log, torch.zeros(shape, device=device) if gate.dt_bias is None else gate.dt_bias


def _zero_padding(out: Tensor, real: Tensor, segments: Segments, rows: np.ndarray, count: int) -> None:
    """Outputs of padding rows become zero, by selection."""
    owner = np.repeat(rows, segments.host_values()[1][rows])
    out.masked_fill_(~real.index_select(0, _to(owner, out.device))[:count, None, None], 0.0)
