"""What an engine may use: plain values, checked when built."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .. import checks
from ..problem import ROLLBACKS, Rollback
from ..serving import BackendWish, StepLimits


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and choices of one engine.

    Attributes:
        max_num_batched_tokens: tokens of one step, of all kinds together.
        max_num_seqs: requests that run at once; others wait in the queue.
        num_slots: rows of the KDA state pool (default: enough for `max_num_seqs` requests). With fewer, requests wait
            for a slot.
        max_cached_tokens: tokens that the attention layers may keep, over all running requests; None for no limit.
            When they run out, the youngest request is preempted and computed again later.
        max_model_len: most tokens of a request, prompt and output together; None for no limit.
        max_drafts: k_max, the most draft tokens of a request in a step; 0 for no speculation.
        rollback: how rejected drafts are undone, "replay" (records) or "slots" (a slot for each position).
        record_rows: records that a slot holds with replay; see `rapidkda.serving.StateShape`. With max_drafts = 0 it
            makes requests decode by verification of one token, which stores a state only where its records are full.
        prefill_chunk: tokens of a step that drafts leave to waiting prompts (default: half of the step). In
            batch-invariant mode every chunk of a prompt but its last has exactly this length.
        batch_invariant: a request's tokens do not depend on its batch mates, to the bit. Slower; see
            `rapidkda.engine.invariant`.
        state_dtype: of the recurrent states, float32 or bfloat16.
        backends: which backends the configuration asks for.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    num_slots: int | None = None
    max_cached_tokens: int | None = None
    max_model_len: int | None = None
    max_drafts: int = 0
    rollback: Rollback = "replay"
    record_rows: int | None = None
    prefill_chunk: int | None = None
    batch_invariant: bool = False
    state_dtype: torch.dtype = torch.float32
    backends: BackendWish = field(default_factory=BackendWish)

    def __post_init__(self) -> None:
        checks.integer("max_num_seqs", self.max_num_seqs, 1)
        checks.integer("max_num_batched_tokens", self.max_num_batched_tokens, 2)
        checks.integer("max_drafts", self.max_drafts, 0)
        checks.choice("rollback", self.rollback, ROLLBACKS)
        checks.boolean("batch_invariant", self.batch_invariant)
        for name in ("num_slots", "max_cached_tokens", "max_model_len", "prefill_chunk", "record_rows"):
            value = getattr(self, name)
            if value is not None:
                checks.integer(name, value, 1)
        if self.record_rows is not None and self.rollback == "slots":
            raise ValueError(f"record_rows must be None with rollback 'slots', got {self.record_rows}")
        if self.batch_invariant and self.verifies and self.rollback == "replay":
            why = "which folds the accepted tokens into the state in one product and so rounds by their number"
            if self.max_drafts == 0:
                raise ValueError(f"record_rows must be None with batch_invariant, got {self.record_rows}, {why}")
            raise ValueError(
                f"rollback must be 'slots' with batch_invariant and max_drafts above 0, got 'replay', {why}"
            )
        chunk = self.chunk
        if self.max_num_seqs + chunk > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens must be at least {self.max_num_seqs + chunk}, one token for each of the "
                f"{self.max_num_seqs} requests of max_num_seqs and a prefill_chunk of {chunk}; "
                f"got {self.max_num_batched_tokens}"
            )
        if self.slots < self.slots_per_request:
            raise ValueError(
                f"num_slots must be at least {self.slots_per_request}, the slots of one request "
                f"(max_drafts={self.max_drafts}, rollback={self.rollback!r}), got {self.slots}"
            )

    @property
    def chunk(self) -> int:
        """`prefill_chunk`, or its default."""
        return self.max_num_batched_tokens // 2 if self.prefill_chunk is None else self.prefill_chunk

    @property
    def verifies(self) -> bool:
        """Whether requests decode by verification: of their drafts, or of one token whose state is deferred."""
        return self.max_drafts > 0 or self.record_rows is not None

    @property
    def slots_per_request(self) -> int:
        return 1 + self.max_drafts if self.rollback == "slots" else 1

    @property
    def slots(self) -> int:
        """Rows of the state pool."""
        return self.max_num_seqs * self.slots_per_request if self.num_slots is None else self.num_slots

    @property
    def limits(self) -> StepLimits:
        """The largest step, for tables and workspace. The engine exports no prefix checkpoints."""
        return StepLimits(max_tokens=self.max_num_batched_tokens, max_requests=self.max_num_seqs, max_checkpoints=0)
