"""Gradients of backends that differentiate, against autograd through the float64 reference."""

from __future__ import annotations

import torch

from rapidkda import ops, reference
from rapidkda.testing import Shape, make_inputs, relative_error

from .cases import case
from .guards import fail, within
from .target import Target

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


@case("gradients", regime=("slow", "fast", "unbounded"), function=("chunk_kda", "fused_recurrent_kda"))
def every_input_has_the_right_gradient(target: Target, regime: str, function: str) -> None:
    """Gradients of outputs and final states, through both gates, grouped values and a ragged packed batch."""
    lens = (20, 1, 0, 37)
    shape = Shape("gradients", lens, 2, value_heads=4, key_dim=16, value_dim=8)
    inputs = make_inputs(shape, regime, dtype=target.dtype, device=target.device, seed=17)
    ends = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], device=target.device)
    start = {name: x[None] for name, x in zip(LEAVES, inputs.operands())}
    start |= {"A_log": inputs.A_log, "dt_bias": inputs.dt_bias, "initial_state": inputs.states.transpose(-1, -2)}
    weigh_out = target.normal(1, sum(lens), 4, 8, seed=1)
    weigh_state = target.normal(4, 4, 16, 8, seed=2)

    def gradients(double: bool) -> dict[str, torch.Tensor]:
        leaves = {name: (x.double() if double else x.clone()).detach().requires_grad_() for name, x in start.items()}
        options = {**leaves, "cu_seqlens": ends, "lower_bound": inputs.lower_bound}
        operands = [options.pop(name) for name in ("q", "k", "v", "g", "beta")]
        if double:
            out, final = reference.kda(*operands, **options, use_qk_l2norm=True, use_gate=True, use_beta_sigmoid=True)
        else:
            out, final = getattr(ops, function)(
                *operands,
                **options,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                backend=target.name,
            )[:2]
        loss = (out.double() * weigh_out).sum() + (final.double() * weigh_state).sum()
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))

    want, got = gradients(True), gradients(False)
    for name in LEAVES:
        if got[name] is None:
            fail(f"{name} has no gradient")
        within(f"gradient of {name}", relative_error(got[name], want[name]), 5e-5)
