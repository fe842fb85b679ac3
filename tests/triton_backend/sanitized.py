"""Prefills whose chains few programs of the scan share, for compute-sanitizer: so few that states are handed over
within chains, with and without checkpoints, an empty sequence and a padding row among them. Sharing changes no bit."""

from __future__ import annotations

import sys

import torch

from rapidkda import Checkpoints, ops
from rapidkda.backends.triton import plan
from rapidkda.ops import kinds
from rapidkda.testing import Inputs, Shape, make_inputs

LENGTHS = (150, 33, 0, 17, 100)
SLOTS = (5, 2, 4, -1, 0)
CHECKPOINTS = ((0, 64, 0), (0, 128, 1), (4, 48, 2))


def run(inputs: Inputs, shares: int, export: bool) -> list[torch.Tensor]:
    """Outputs, the pool, and exported states."""
    plan.shares = lambda *call: shares
    kinds.forget()  # they hold plans
    pool = torch.cat([inputs.states, inputs.states[:1]])
    exported = torch.zeros_like(pool[:3])
    out = torch.zeros_like(inputs.v)
    exports = {"checkpoints": Checkpoints.build(CHECKPOINTS, len(LENGTHS), device=pool.device)} if export else {}
    ops.prefill(
        *inputs.operands(),
        segments=inputs.segments,
        state=pool,
        slots=torch.tensor(SLOTS, device=pool.device),
        out=out,
        backend="triton",
        checkpoint_pool=exported if export else None,
        **exports,
        **inputs.options(),
    )
    return [out, pool, exported]


def main() -> int:
    failed = 0
    for dtype in (torch.bfloat16, torch.float32):
        inputs = make_inputs(Shape("small", LENGTHS, 2), "slow", dtype=dtype, device="cuda", layout="fused", gaps=True)
        for export in (False, True):
            want = run(inputs, 0, export)
            for shares in (1, 3, 7):
                same = all(map(torch.equal, run(inputs, shares, export), want))
                how = "with" if export else "without"
                sys.stdout.write(f"{dtype}, {shares} shares, {how} checkpoints: {'same' if same else 'DIFFERENT'}\n")
                failed += not same
    return failed


if __name__ == "__main__":
    sys.exit(main())
