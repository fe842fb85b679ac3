"""Which neighbours of a prefill its kernel takes on, and why not the others.

The norm needs the whole form, where one CTA has all channels of a head; the convolution that or the pair. A call that
another form would serve gets one of these where that form and the neighbours by themselves would take longer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....problem import FusedConv, FusedNorm, PrefillCall
from .plan import Neighbour, plan_neighbours
from .prefill import clusters_convolve, multiprocessors, sizes
from .tensor_map import ALIGNMENT

_TAPS = 4


def unfused(call: PrefillCall) -> dict[str, list[str]]:
    """`FusingBackend.unfused`."""
    if call.segments.count == 0:
        return {"conv": ["no segments"], "norm": ["no segments"]}
    reasons: dict[Neighbour, list[str]] = {}
    moved: dict[Neighbour, int] = {}
    rows = call.segments.total if call.segments.total >= 0 else call.tokens.count
    if call.conv is not None:
        reasons["conv"] = _conv(call.conv)
        moved["conv"] = 2 * 2 * rows * call.conv.x.shape[1]  # bytes, in and out
    if call.norm is not None:
        reasons["norm"] = _norm(call.norm)
        moved["norm"] = 3 * 2 * rows * call.norm.z.shape[1] * call.norm.z.shape[2]
    index = call.tokens.q.device.index
    sms = multiprocessors(torch.cuda.current_device() if index is None else index)
    able = tuple((name, moved[name]) for name, found in reasons.items() if not found)
    chosen, costs = plan_neighbours(*sizes(call), sms, able, clusters_convolve(call))
    for name, _ in able:
        if name not in chosen:
            reasons[name] = [f"the planner expects {_costs(costs)}"]
    return {name: found for name, found in reasons.items() if found}


def _costs(costs: dict[tuple[Neighbour, ...], float]) -> str:
    return ", ".join(f"{us:.0f} us with {' and '.join(chosen) or 'neither'} fused" for chosen, us in costs.items())


def _conv(conv: FusedConv) -> list[str]:
    reasons = _rows("x", conv.x)
    if conv.weight.shape[1] != _TAPS:
        reasons.append(f"needs {_TAPS} taps, got {conv.weight.shape[1]}")
    if conv.weight.dtype is not torch.float32 or not conv.weight.is_contiguous():
        reasons.append(f"needs dense float32 weights, got {conv.weight.dtype} with strides {conv.weight.stride()}")
    pools = [pool for pool in (conv.pool, conv.checkpoint_pool) if pool is not None]
    reasons += [f"needs bfloat16 histories, got {pool.dtype}" for pool in pools if pool.dtype is not torch.bfloat16]
    if len({pool.stride()[1:] for pool in pools}) > 1:
        reasons.append("needs checkpoints of histories that lie like the pool")
    return reasons


def _norm(norm: FusedNorm) -> list[str]:
    reasons = _rows("z", norm.z)
    if norm.activation != "sigmoid":
        reasons.append(f"needs the activation sigmoid, got {norm.activation}")
    if norm.z.dtype is not torch.bfloat16:
        reasons.append(f"needs bfloat16 z, got {norm.z.dtype}")
    if norm.weight.dtype is not torch.float32 or norm.weight.stride(0) != 1:
        reasons.append(f"needs dense float32 weights, got {norm.weight.dtype} with stride {norm.weight.stride(0)}")
    return reasons


def _rows(name: str, x: Tensor) -> list[str]:
    """Rows that the copy engine can read as they lie."""
    bad = [step for step in x.stride()[:-1] if step * x.element_size() % ALIGNMENT]
    return [f"needs rows of {name} at multiples of {ALIGNMENT} bytes, got strides {x.stride()}"] if bad else []
