"""Other implementations that `rapidkda bench` times beside ours. None is a dependency; a missing one says why.

Each peer gets what it needs prepared outside the timed call (dense copies, dtypes, index tensors), which is in its
favour: an engine pays for them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..problem import Op
from ..testing.inputs import Inputs


@dataclass
class Bound:
    """A call ready to be timed, the buffers that it writes, and how to put them back before a checked run."""

    call: Callable[[], None]
    result: Callable[[], tuple[Tensor, Tensor]]  # outputs [T, HV, V] and final states [N, HV, V, K] of the last run
    reset: Callable[[], None]


class Peer(Protocol):
    name: str

    def unmet(self, op: Op, inputs: Inputs) -> str:
        """Why it cannot run this, or an empty string."""
        ...

    def bind(self, inputs: Inputs) -> Bound: ...


class FlashKda:
    """FlashKDA's fused prefill, from the extension that vLLM ships or from the library file at `path`."""

    name = "flashkda"

    def __init__(self, path: Path | None = None):
        self.missing = _load_flashkda(path)

    def unmet(self, op: Op, inputs: Inputs) -> str:
        if op != "prefill":
            return "it has prefill only"
        if self.missing:
            return self.missing
        if inputs.lower_bound is None:
            return "it has the bounded gate only"
        return "" if inputs.q.shape[2] == inputs.v.shape[2] == 128 else "it takes head dim 128 only"

    def bind(self, inputs: Inputs) -> Bound:
        extension = torch.ops._flashkda_C
        q, k, v, g, beta = (x.contiguous()[None] for x in inputs.operands())
        tokens, heads = q.shape[1:3]
        lengths = [length for _, length in inputs.spans]
        ends = torch.tensor([0, *lengths], device=q.device).cumsum(0)  # int64, as it wants them
        scratch = torch.empty(
            extension.get_workspace_size(tokens, heads, len(lengths)), dtype=torch.uint8, device=q.device
        )
        out, final = torch.empty_like(v), torch.empty_like(inputs.states)
        gate = inputs.A_log.float().contiguous(), inputs.dt_bias.float().contiguous()  # type: ignore[union-attr]
        scale = q.shape[3] ** -0.5 if inputs.scale is None else inputs.scale

        def call() -> None:
            extension.fwd(
                q, k, v, g, beta, scale, out, scratch, *gate, inputs.lower_bound, inputs.states, final, ends, None, None
            )

        return Bound(call, lambda: (out[0], final), lambda: poison(out, final))


class Cudnn:
    """The fused Hopper prefill of NVIDIA's cuDNN frontend. It reads packed operands, gates and write strengths in
    float32, and cuts sequences where a bound says that the state has decayed; the bound takes sums per channel, which
    does not hold for every input."""

    name = "cudnn"

    # Activations inside its kernel, as its `cuda_host` numbers them.
    _L2_NORM, _BOUNDED_GATE, _BETA_SIGMOID = 1, 2, 4

    def unmet(self, op: Op, inputs: Inputs) -> str:
        if op != "prefill":
            return "it has prefill only"
        if inputs.q.device.type != "cuda" or torch.cuda.get_device_capability(inputs.q.device) != (9, 0):
            return "it needs an NVIDIA GPU of compute capability 9.0"
        try:
            importlib.import_module("cudnn.linear_attention.hopper.cuda_host")
        except Exception as error:  # an installed package that cannot be imported here is a missing peer too
            return f"it cannot be imported: {type(error).__name__}: {error}"
        if inputs.lower_bound is None:
            return "it has the bounded gate only"
        return "" if inputs.q.shape[2] == inputs.v.shape[2] == 128 else "it takes head dim 128 only"

    def bind(self, inputs: Inputs) -> Bound:
        host: Any = importlib.import_module("cudnn.linear_attention.hopper.cuda_host")
        q, k, v, g, beta = (x.contiguous() for x in inputs.operands())
        g, beta, states = g.float(), beta.float(), inputs.states.contiguous()
        device = q.device
        lengths = [length for _, length in inputs.spans]
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        out, final = torch.empty_like(v), torch.empty_like(states)
        gate = [x.float().contiguous() for x in (inputs.A_log, inputs.dt_bias)]  # type: ignore[union-attr]
        scale = q.shape[2] ** -0.5 if inputs.scale is None else inputs.scale
        buffers = q, k, v, g, beta, ends, states, out, final

        def call() -> None:
            host.launch(
                device.index or 0,
                torch.cuda.current_stream(device).cuda_stream,
                *(x.data_ptr() for x in buffers),
                total_tokens=q.shape[0],
                n_seqs=len(lengths),
                n_heads=v.shape[1],
                a_log=gate[0].data_ptr(),
                dt_bias=gate[1].data_ptr(),
                gate_lower_bound=inputs.lower_bound,
                flags=self._L2_NORM | self._BOUNDED_GATE | self._BETA_SIGMOID,
                q_scale=scale,
                n_qk_heads=q.shape[1],
            )

        return Bound(call, lambda: (out, final), lambda: poison(out, final))


class Fla:
    """flash-linear-attention's Triton kernels: `chunk_kda` for prefill, `fused_recurrent_kda` for decode."""

    name = "fla"

    def unmet(self, op: Op, inputs: Inputs) -> str:
        if op == "verify":
            return "it has no verification"
        os.environ.setdefault("FLA_FLASH_KDA", "0")  # its own kernels, not a hand-over to FlashKDA
        # It keeps what it derives from the last few segment tables; a table that it has lost is read on the host again,
        # which no graph can capture. Enough of them for all input sets that take turns.
        os.environ.setdefault("FLA_TENSOR_CACHE_SIZE", "64")
        try:
            importlib.import_module("fla.ops.kda")
        except Exception as error:  # an installed package that cannot be imported here is a missing peer too
            return f"it cannot be imported: {type(error).__name__}: {error}"
        return "" if inputs.q.device.type == "cuda" else "it needs a GPU"

    def bind(self, inputs: Inputs) -> Bound:
        kda: Any = importlib.import_module("fla.ops.kda")
        q, k, v, g, beta = (x.contiguous()[None] for x in inputs.operands())
        lengths = [length for _, length in inputs.spans]
        decode = max(lengths) == 1
        ends = torch.tensor([0, *lengths], device=q.device).cumsum(0).to(torch.int32)
        if decode:  # one token a sequence is a batch
            q, k, v, g, beta = (x[0][:, None] for x in (q, k, v, g, beta))
        bounded = {} if inputs.lower_bound is None else {"lower_bound": inputs.lower_bound}
        special = {} if decode else {"safe_gate": inputs.lower_bound is not None, "cu_seqlens": ends}
        function = kda.fused_recurrent_kda if decode else kda.chunk_kda

        results: list[Tensor] = []  # of the last call, or of the first one in a graph, which is the one that is checked
        captured = False

        @torch.no_grad()
        def call() -> None:
            nonlocal captured
            made = function(
                q=q,
                k=k,
                v=v,
                g=g,
                beta=beta,
                A_log=inputs.A_log,
                dt_bias=inputs.dt_bias,
                initial_state=inputs.states,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                state_v_first=True,
                **bounded,
                **special,
            )[:2]
            if not captured:
                results[:] = made
            captured = captured or torch.cuda.is_current_stream_capturing()

        return Bound(
            call,
            lambda: (results[0].reshape(inputs.v.shape), results[1]),
            lambda: poison(*results),  # under a graph, the buffers that its replay writes
        )


def poison(*buffers: Tensor) -> None:
    """Fill with NaN, so that what is not written shows."""
    for buffer in buffers:
        buffer.fill_(float("nan"))


def _load_flashkda(path: Path | None) -> str:
    """Load the extension; an empty string, or why it is not there."""
    if not torch.cuda.is_available():
        return "it needs a CUDA GPU"
    try:
        if path is not None:
            torch.ops.load_library(str(path))
        elif not hasattr(torch.ops._flashkda_C, "fwd"):
            importlib.import_module("vllm._flashkda_C")
    except (ImportError, OSError, AttributeError) as error:
        return f"{path or 'vllm._flashkda_C'} cannot be loaded: {error}"
    return "" if hasattr(torch.ops._flashkda_C, "fwd") else "the library has no operator _flashkda_C.fwd"
