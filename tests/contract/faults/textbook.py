"""A textbook chunked prefill with switches for the numerical faults of real kernels. Right when no switch is set.

It stands in for the torch backend's prefill in `faults`, so that those faults do not depend on how that one works.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rapidkda import reference
from rapidkda.problem import PrefillCall, Tokens

CHUNK = 16


@dataclass(frozen=True)
class Switches:
    """Which fault to commit.

    anchor: row whose running sum rescales all exponents of a chunk (None: every difference is formed by itself).
    half_factors: round the rescaled factors to bfloat16.
    power_inverse: invert the unit-triangular matrix by repeated squaring in float16.
    unmasked_tail: rows past the end repeat the last token and count.
    summed_gate_bound: forget the state where exp of the summed gates is small in every channel.
    """

    anchor: int | None = None
    half_factors: bool = False
    power_inverse: bool = False
    unmasked_tail: bool = False
    summed_gate_bound: bool = False


def log_decay(tokens: Tokens) -> Tensor:
    """Float32 log decay [T, HV, K]."""
    gate = tokens.gate
    if gate.kind == "log_decay":
        return tokens.g.float()
    return reference.gate_log_decay(tokens.g, gate.A_log, gate.dt_bias, gate.lower_bound).float()


def write_strength(tokens: Tokens) -> Tensor:
    """Float32 write strength [T, HV]."""
    beta = tokens.beta.float()
    return torch.sigmoid(beta) * tokens.beta_scale if tokens.beta_logits else beta


def prefill(call: PrefillCall, switches: Switches) -> None:
    """`Backend.prefill` without checkpoints, one segment and one chunk at a time."""
    tokens = call.tokens
    q, k = (reference.l2_normalize(x).float() if tokens.l2norm else x.float() for x in (tokens.q, tokens.k))
    group = tokens.value_heads // tokens.heads
    q, k = (x.repeat_interleave(group, 1) for x in (q * tokens.scale, k))
    g, b = log_decay(tokens), write_strength(tokens)
    for n, (first, length) in enumerate(zip(*(x.tolist() for x in call.segments.host_values()), strict=True)):
        read = n if call.read_slots is None else int(call.read_slots[n])
        write = n if call.write_slots is None else int(call.write_slots[n])
        starts = call.initial is not None and (call.has_initial_state is None or bool(call.has_initial_state[n]))
        state = torch.zeros(tokens.value_heads, tokens.key_dim, tokens.value_dim)
        if starts and call.initial is not None:
            state = (call.initial[read].transpose(-1, -2) if call.state_v_first else call.initial[read]).float()
        for start in range(first, first + length, CHUNK):
            row = torch.arange(start, start + CHUNK).clamp(max=first + length - 1)
            valid = torch.arange(start, start + CHUNK) < first + length
            if switches.unmasked_tail:
                valid = valid | True
            decay = torch.where(valid[:, None, None], g[row], 0.0).transpose(0, 1)  # [HV, C, K]
            strength = torch.where(valid[:, None], b[row], 0.0).t()  # [HV, C]
            operands = (x[row].float().transpose(0, 1) for x in (q, k, tokens.v))
            out, state = _chunk(*operands, decay, strength, state, switches)
            count = min(CHUNK, first + length - start)
            call.out[start : start + count] = out.transpose(0, 1)[:count].to(call.out.dtype)
        if call.final is not None:
            call.final[write] = (state.transpose(-1, -2) if call.state_v_first else state).to(call.final.dtype)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor, switches: Switches
) -> tuple[Tensor, Tensor]:
    """q, k, g [HV, C, K]; v [HV, C, V]; b [HV, C]; state [HV, K, V]."""
    sums = g.cumsum(1)
    if switches.anchor is None:
        # sums of the gates between j and i, each formed by itself: exact and never above 0
        between = torch.stack([(g * (torch.arange(CHUNK) > j)[:, None]).cumsum(1) for j in range(CHUNK)], 2)
        weight = between.exp()  # [HV, i, j, K]
        keys, queries = (torch.einsum("hik,hijk,hjk->hij", x, weight, k) for x in (k, q))
    else:
        centre = sums[:, switches.anchor : switches.anchor + 1]
        rounded = torch.bfloat16 if switches.half_factors else torch.float32
        early = (k * (centre - sums).exp()).to(rounded).float()
        keys, queries = ((x * (sums - centre).exp()).to(rounded).float() @ early.transpose(1, 2) for x in (k, q))
    lower = keys.tril(-1) * b.unsqueeze(-1)
    identity = torch.eye(CHUNK)
    if switches.power_inverse:
        power = -lower.half()
        inverse = identity.half() + power
        for _ in range(3):
            power = power @ power
            inverse = inverse @ (identity.half() + power)
        inverse = inverse.float()
    else:
        inverse = torch.linalg.solve_triangular(identity + lower, identity, upper=False, unitriangular=True)
    inverse = inverse * b.unsqueeze(1)
    u = inverse @ (v - (k * sums.exp()) @ state)
    out = (q * sums.exp()) @ state + queries.tril() @ u
    total = sums[:, -1:]  # [HV, 1, K]
    k_end = k * (total - sums).exp()
    carried = state
    if switches.summed_gate_bound:
        carried = torch.where(total.exp().amax(-1, keepdim=True) < 1e-6, 0.0, state)
        u = inverse @ (v - (k * sums.exp()) @ carried)
    return out, carried * total.exp().transpose(1, 2) + k_end.transpose(1, 2) @ u
