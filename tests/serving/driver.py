"""A layer with its pool, tables and workspace, stepped by records; every request's outputs by its id."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from rapidkda.serving import KDALayer, Rollback, StatePool, StepBatch, StepLimits, StepRequest

from .oracle import Oracle, State, make_layer, make_workspace, snapshot

LIMITS = StepLimits(max_tokens=512, max_requests=16)


class Driver:
    """Steps of one layer over a pool whose every slot, like the workspace, starts as NaN."""

    def __init__(
        self,
        layer: KDALayer | None = None,
        *,
        max_drafts: int = 3,
        rollback: Rollback = "replay",
        record_rows: int | None = None,
        slots: int = 40,
        limits: StepLimits = LIMITS,
        fixed: bool = False,
        pad_slot: int = -1,
        seed: int = 0,
    ):
        self.layer = make_layer(seed) if layer is None else layer
        self.oracle = Oracle(self.layer)
        self.device = self.layer.in_proj.device
        shape = self.layer.state_shape(max_drafts, rollback, record_rows=record_rows)
        self.pool = StatePool(shape, slots, device=self.device, pad_slot=pad_slot)
        self.pool.fill(range(slots), float("nan"))
        self.batch = StepBatch(self.pool, limits, fixed=fixed)
        self.workspace = make_workspace(self.layer, self.pool, limits, device=self.device)
        self.generator = torch.Generator().manual_seed(seed)

    def hidden(self, count: int) -> Tensor:
        """Random inputs."""
        values = torch.randn(count, self.layer.hidden_size, generator=self.generator)
        return values.to(self.device, self.layer.in_proj.dtype)

    def step(
        self, *records: StepRequest, inputs: dict[Hashable, Tensor], num_tokens: int | None = None
    ) -> dict[Hashable, Tensor]:
        """Run one step; `inputs` are the requests' hidden rows. Padding rows hold NaN."""
        self.batch.fill(records, num_tokens)
        assert self.batch.plan is not None
        hidden = torch.full(
            (self.batch.num_tokens, self.layer.hidden_size),
            float("nan"),
            dtype=self.layer.in_proj.dtype,
            device=self.device,
        )
        spans: dict[Hashable, slice] = {}
        for rows in self.batch.plan.rows.values():
            for row in rows:
                spans[row.request_id] = slice(row.first_token, row.first_token + row.length)
                hidden[spans[row.request_id]] = inputs[row.request_id]
        self.workspace.fill(255)
        out = self.layer(hidden, self.batch, self.pool, self.workspace)
        for start, stop in self.batch.plan.padding:
            assert (out[start:stop] == 0).all()
        return {name: out[span] for name, span in spans.items()}

    def prefill(self, name: Hashable, hidden: Tensor) -> State:
        """Start a request with a prompt; returns the oracle's state after it."""
        slots = self.pool.allocate(name)
        self.step(StepRequest(name, "prefill", len(hidden), slots, has_initial_state=False), inputs={name: hidden})
        return self.oracle.run(hidden, self.oracle.fresh())[1][-1]

    def slots(self, name: Hashable) -> tuple[int, ...]:
        assert self.pool.slots is not None
        return self.pool.slots.slots_of(name)

    def settle(self, name: Hashable, accepted: int) -> None:
        """An empty prefill: fold the accepted drafts into the state and do nothing else."""
        empty = self.hidden(0)
        self.step(StepRequest(name, "prefill", 0, self.slots(name), accepted=accepted), inputs={name: empty})

    def snapshot(self) -> list[Tensor]:
        return snapshot(self.pool)
