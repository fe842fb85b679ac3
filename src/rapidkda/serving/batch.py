"""One step of the engine as segment tables on the step's own token axis.

`StepBatch.fill` takes plain records in the engine's token order, refuses anything that does not fit before it writes,
and leaves one table a kind. All tables live in one persistent device buffer that is refilled by one copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import plan
from .config import StepLimits
from .plan import Plan, StepRequest
from .pool import StatePool
from .tables import RowStore, RowTable, VerifyStore, VerifyTable


class StepBatch:
    """The tables of a step, refilled for every step.

    Args:
        pool: whose slots the requests name.
        limits: the largest step.
        fixed: keep every table at its largest size, filled up with padding rows, so that a captured CUDA graph can be
            replayed after `fill`. The token axis then always has `limits.max_tokens` rows, and a step takes no
            checkpoints.
    """

    def __init__(self, pool: StatePool, limits: StepLimits, *, fixed: bool = False):
        self.pool = pool
        self.limits = replace(limits, max_checkpoints=0) if fixed else limits
        self.fixed = fixed
        self.num_tokens = 0
        self.plan: Plan | None = None
        self.prefill: RowTable | None = None
        self.decode: RowTable | None = None
        self.verify: VerifyTable | None = None
        limits = self.limits
        pin = pool.device.type == "cuda"
        parts = (
            RowStore.size(limits.max_prefills, limits.max_checkpoints),
            RowStore.size(limits.max_decodes, 0),
            VerifyStore.size(limits.max_verifies, pool.shape.slots_per_request),
        )
        self._host = torch.zeros(sum(parts), dtype=torch.int32, pin_memory=pin)
        self._device = torch.zeros(sum(parts), dtype=torch.int32, device=pool.device)
        self._padding_host = torch.ones(limits.max_tokens, dtype=torch.bool, pin_memory=pin)
        self._padding = torch.ones(limits.max_tokens, dtype=torch.bool, device=pool.device)
        self._copied = torch.cuda.Event() if pin else None
        hosts = [part.numpy() for part in self._host.split(parts)]
        prefill, decode, verify = self._device.split(parts)
        verifies = pool.shape.verify_tokens > 0
        self._prefill = RowStore(hosts[0], prefill, limits.max_prefills, limits.max_checkpoints)
        self._decode = RowStore(hosts[1], decode, limits.max_decodes, 0)
        self._verify = VerifyStore(hosts[2], verify, limits.max_verifies, pool.shape)
        if fixed:
            self.prefill = self._prefill.fixed(limits.max_tokens, settles=verifies)
            self.decode = self._decode.fixed(1, settles=verifies)
            self.verify = self._verify.fixed()
            self.fill(())

    @property
    def nbytes(self) -> int:
        """Device bytes of the tables."""
        return self._device.nbytes + self._padding.nbytes

    def fill(self, requests: Sequence[StepRequest], num_tokens: int | None = None) -> StepBatch:
        """Take the next step.

        Args:
            requests: in the order of their tokens. Without `first_token` a request follows the one before it.
            num_tokens: rows of the token axis (default: up to the last request's end); the rest are padding.

        Filling is the promise to run: open drafts are settled and opened here. Raises ValueError that names the
        request and the value when anything does not fit (see `plan.build`); then nothing has changed.
        """
        step = plan.build(requests, self.pool, self.limits, self.limits.max_tokens if self.fixed else num_tokens)
        self._stage(step)
        if self.pool.slots is not None:
            for row in itertools.chain.from_iterable(step.rows.values()):
                self.pool.slots.set_run(row.request_id)
            for request in step.settled:
                self.pool.slots.set_open(request, 0)
            for request, count in step.opened.items():
                self.pool.slots.set_open(request, count)
        self.plan = step
        self.num_tokens = step.num_tokens
        return self

    def zero_padding(self, rows: Tensor) -> None:
        """Set the padding rows of a tensor [T, ...] to zero, whatever they hold."""
        if self.fixed:
            rows.masked_fill_(self._padding.view(-1, *(1,) * (rows.ndim - 1)), 0.0)
        elif self.plan is not None:
            for start, stop in self.plan.padding:
                rows[start:stop].zero_()

    def _stage(self, step: Plan) -> None:
        """Write the tables of a checked step into the staging buffer and send it to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before has left the staging buffer
        prefills, decodes, verifies = (step.rows[kind] for kind in ("prefill", "decode", "verify"))
        self._prefill.write(prefills, self.pool.pad_slot)
        self._decode.write(decodes, self.pool.pad_slot)
        self._verify.write(verifies, self.pool.pad_slot)
        self._device.copy_(self._host, non_blocking=True)
        if self.fixed:
            padding = self._padding_host.numpy()
            padding[:] = False
            for start, stop in step.padding:
                padding[start:stop] = True
            self._padding.copy_(self._padding_host, non_blocking=True)
        else:
            self.prefill = self._prefill.table(prefills)
            self.decode = self._decode.table(decodes)
            self.verify = self._verify.table(verifies)
        if self._copied is not None:
            self._copied.record()
