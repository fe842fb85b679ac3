"""Who owns which slot of the pools, and which requests have draft tokens whose fate is open.

Host bookkeeping only, one table for all layers, keyed by request id and never by row: a row order is an accident of one
step. The life of a request's drafts:

    settled --verify of n tokens--> open(n) --next step says accepted a, 1 <= a <= n--> settled, and that step runs

An open request must say `accepted` in its next step, whatever its kind; a settled one must not. Starting afresh
(a prefill without initial state, or from another slot) or leaving drops what is open.
"""

from __future__ import annotations

from collections.abc import Hashable

from .. import checks


class SlotsExhausted(RuntimeError):
    """The pool has too few free slots for a request. The caller queues it; nothing was allocated."""


class SlotTable:
    """Allocation of slots and the open drafts of requests.

    Args:
        num_slots: rows of every pool.
        pad_slot: padding marker of slot tables. One that is a row of the pool (0 in vLLM-style pools) is never given
            out; -1 leaves all rows to requests.
    """

    def __init__(self, num_slots: int, pad_slot: int = -1):
        self.num_slots = checks.integer("num_slots", num_slots, 1)
        self.pad_slot = checks.integer("pad_slot", pad_slot, -1)
        self._free = [slot for slot in reversed(range(self.num_slots)) if slot != self.pad_slot]
        self._owned: dict[Hashable, tuple[int, ...]] = {}
        self._owner: dict[int, Hashable] = {}
        self._open: dict[Hashable, int] = {}
        self._ran: set[Hashable] = set()

    @property
    def available(self) -> int:
        """Free slots."""
        return len(self._free)

    @property
    def owners(self) -> tuple[Hashable, ...]:
        """Everyone who holds slots."""
        return tuple(self._owned)

    def allocate(self, owner: Hashable, count: int = 1) -> tuple[int, ...]:
        """Give `owner` (a request id, or the name of a prefix checkpoint) `count` slots.

        Raises:
            ValueError: the owner already holds slots.
            SlotsExhausted: fewer than `count` are free; nothing was allocated.
        """
        checks.integer("count", count, 1)
        if owner in self._owned:
            raise ValueError(f"owner must not hold slots yet, got {owner!r}, which holds {self._owned[owner]}")
        if count > len(self._free):
            raise SlotsExhausted(
                f"{owner!r} needs {count} slots, {len(self._free)} of {self.num_slots} are free "
                f"({len(self._owned)} owners hold the rest)"
            )
        slots = tuple(self._free.pop() for _ in range(count))
        self._owned[owner] = slots
        self._owner.update(dict.fromkeys(slots, owner))
        return slots

    def free(self, owner: Hashable) -> tuple[int, ...]:
        """Take back all slots of `owner` and forget its open drafts. Returns the slots."""
        slots = self.slots_of(owner)
        del self._owned[owner]
        for slot in slots:
            del self._owner[slot]
        self._open.pop(owner, None)
        self._ran.discard(owner)
        self._free.extend(reversed(slots))
        return slots

    def slots_of(self, owner: Hashable) -> tuple[int, ...]:
        """The slots that `owner` holds."""
        if owner not in self._owned:
            raise ValueError(f"owner must hold slots, got {owner!r}, which holds none")
        return self._owned[owner]

    def owner_of(self, slot: int) -> Hashable | None:
        """Who holds a slot, or None."""
        return self._owner.get(slot)

    def has_run(self, owner: Hashable) -> bool:
        """Whether `owner` has been a request of a step since it holds its slots: checkpoints never are."""
        return owner in self._ran

    def set_run(self, request_id: Hashable) -> None:
        """Record that a request is in a step."""
        self._ran.add(request_id)

    def open_drafts(self, request_id: Hashable) -> int:
        """Tokens of the request's last verify step whose acceptance is not known yet; 0 if it is settled."""
        return self._open.get(request_id, 0)

    def set_open(self, request_id: Hashable, tokens: int) -> None:
        """Record that a verify step of `tokens` tokens ran (0: the request is settled)."""
        if tokens:
            self._open[request_id] = tokens
        else:
            self._open.pop(request_id, None)
