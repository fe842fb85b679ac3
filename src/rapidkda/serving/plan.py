"""From the engine's records to rows: every check of a step, on the host, before anything is written."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .. import checks
from ..problem import CHECKPOINT_ALIGNMENT
from .config import StateShape, StepLimits
from .pool import StatePool

Kind = Literal["prefill", "decode", "verify", "padding"]
KINDS: tuple[Kind, ...] = ("prefill", "decode", "verify", "padding")


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request's part of a step.

    Attributes:
        request_id: any hashable; what acceptance is keyed by.
        kind: "prefill" (a chunk of any length, first or continued), "decode" (1 token), "verify" (the last accepted
            token and its drafts, if any) or "padding".
        num_tokens: tokens of the request in this step. 0 is legal for a prefill, which then only settles its state.
        slots: of the pool: 1, or up to 1 + k_max with slot per position, first the one that the state rests in.
        has_initial_state: False for the first chunk of a prompt, whatever its slot holds.
        accepted: tokens accepted of the request's verify step just before, 1 to its length; 0 if there was none.
        read_slot: start from this slot instead (a prefix checkpoint), and leave it as it is.
        checkpoints: (offset, slot) pairs: the state after `offset` tokens of this chunk goes to `slot`. Offsets are
            multiples of 16.
        first_token: where the request's tokens start, if they do not follow the request before; the gap is padding.
    """

    request_id: Hashable
    kind: Kind
    num_tokens: int
    slots: tuple[int, ...] = ()
    has_initial_state: bool = True
    accepted: int = 0
    read_slot: int | None = None
    checkpoints: tuple[tuple[int, int], ...] = ()
    first_token: int | None = None

    @staticmethod
    def padding(num_tokens: int) -> StepRequest:
        """Rows of no request."""
        return StepRequest(None, "padding", num_tokens)


@dataclass(frozen=True, slots=True)
class Row:
    """One request in a table."""

    request_id: Hashable
    first_token: int
    length: int
    slots: tuple[int, ...]
    read_slot: int
    conv_read_slot: int
    has_initial_state: bool
    accepted: int
    checkpoints: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Plan:
    """A checked step.

    Attributes:
        num_tokens: rows of the token axis.
        rows: the requests of each kind, in engine order.
        padding: token ranges (start, stop) of no request.
        writers: the request that claims each slot: its own ones and the targets of its checkpoints.
        settled: requests whose open drafts this step settles or drops.
        opened: requests that verify, with their number of tokens.
    """

    num_tokens: int = 0
    rows: dict[Kind, list[Row]] = field(default_factory=lambda: {"prefill": [], "decode": [], "verify": []})
    padding: list[tuple[int, int]] = field(default_factory=list)
    writers: dict[int, Hashable] = field(default_factory=dict)
    settled: list[Hashable] = field(default_factory=list)
    opened: dict[Hashable, int] = field(default_factory=dict)

    def written(self, shape: StateShape) -> dict[int, Hashable]:
        """The slots whose recurrent state this step leaves, with their requests."""
        slots: dict[int, Hashable] = {}
        for kind, rows in self.rows.items():
            for row in rows:
                states = row.length if kind == "verify" and shape.rollback == "slots" else 1
                slots.update(dict.fromkeys(row.slots[:states], row.request_id))
                slots.update((slot, row.request_id) for _, slot in row.checkpoints)
        return slots


def build(requests: Sequence[StepRequest], pool: StatePool, limits: StepLimits, num_tokens: int | None) -> Plan:
    """Check a step against its pool and limits.

    Raises ValueError (TypeError for a wrong type) naming the request, the argument, what it got and what it takes.
    """
    step = Plan()
    requests = tuple(requests)  # gone through more than once
    end = 0
    seen: set[Hashable] = set()
    for request in requests:
        first = _place(request, end)
        if first > end:
            _pad(step, end, first)
        end = first + request.num_tokens
        if request.kind == "padding":
            _check_padding(request)
            _pad(step, first, end)
            continue
        if request.request_id in seen:
            raise _error(request, "request_id", "appear once a step", "it twice")
        seen.add(request.request_id)
        _check_tokens(request, pool.shape)
        _claim(step, request, pool)
        settled = _settle(request, pool)
        if settled:
            step.settled.append(request.request_id)
        if request.kind == "verify":
            step.opened[request.request_id] = request.num_tokens
        step.rows[request.kind].append(_row(request, first, pool.shape))
    for request in requests:
        _check_checkpoints(step, request, pool)
    for request in requests:
        _check_reads(step, request, pool)
    step.num_tokens = end if num_tokens is None else checks.integer("num_tokens", num_tokens, 0)
    if step.num_tokens < end:
        raise ValueError(f"num_tokens must reach the last request's end at {end}, got {step.num_tokens}")
    _pad(step, end, step.num_tokens)
    _check_limits(step, limits)
    return step


def _error(request: StepRequest, argument: str, takes: str, got: str) -> ValueError:
    return ValueError(f"{argument} of request {request.request_id!r} ({request.kind}) must {takes}, got {got}")


def _integer(request: StepRequest, argument: str, value: object, minimum: int) -> None:
    if type(value) is not int or value < minimum:
        checks.integer(f"{argument} of request {request.request_id!r}", value, minimum)


def _place(request: StepRequest, end: int) -> int:
    """Check kind and token counts; returns the first token."""
    if not isinstance(request, StepRequest):
        raise TypeError(f"requests must hold StepRequest records, got {type(request).__name__}")
    if request.kind not in KINDS:
        raise _error(request, "kind", f"be one of {', '.join(KINDS)}", repr(request.kind))
    _integer(request, "num_tokens", request.num_tokens, 0)
    if request.first_token is None:
        return end
    _integer(request, "first_token", request.first_token, 0)
    if request.first_token < end:
        raise _error(
            request,
            "first_token",
            f"not lie before the end of the request before it at {end}",
            str(request.first_token),
        )
    return request.first_token


def _pad(step: Plan, start: int, stop: int) -> None:
    if stop <= start:
        return
    if step.padding and step.padding[-1][1] == start:
        start = step.padding.pop()[0]
    step.padding.append((start, stop))


def _check_padding(request: StepRequest) -> None:
    if request.slots or request.read_slot is not None or request.checkpoints or request.accepted:
        raise _error(request, "slots, read_slot, checkpoints and accepted", "be absent", repr(request))


def _check_tokens(request: StepRequest, shape: StateShape) -> None:
    if request.kind == "decode" and request.num_tokens != 1:
        raise _error(request, "num_tokens", "be 1", str(request.num_tokens))
    if request.kind == "verify":
        most = shape.verify_tokens
        if most == 0:
            raise _error(request, "kind", "not be verify with a pool of max_drafts = 0 and no records", "verify")
        if shape.rollback == "slots":
            most = min(most, max(1, len(request.slots)))
        if not 1 <= request.num_tokens <= most:
            raise _error(
                request,
                "num_tokens",
                f"be 1 to {most} (1 + k_max = {shape.verify_tokens}, one slot each with slot per position)",
                str(request.num_tokens),
            )
    if not request.has_initial_state and request.kind != "prefill":
        raise _error(request, "has_initial_state", "be True: a fresh request starts as a prefill", "False")


def _check_slot(request: StepRequest, argument: str, slot: int, pool: StatePool) -> None:
    _integer(request, argument, slot, -(2**31))
    if slot == pool.pad_slot:
        raise _error(request, argument, "not hold the padding marker", str(slot))
    if not 0 <= slot < pool.num_slots:
        raise _error(request, argument, f"be in 0..{pool.num_slots - 1}", str(slot))


def _claim(step: Plan, request: StepRequest, pool: StatePool) -> None:
    """Every slot of a request is its own in this step, and the one it was given."""
    most = pool.shape.slots_per_request
    if not 1 <= len(request.slots) <= most:
        raise _error(request, "slots", f"hold 1 to {most} slots" if most > 1 else "hold 1 slot", repr(request.slots))
    for slot in request.slots:
        _check_slot(request, "slots", slot, pool)
        if slot in step.writers:
            raise _error(request, "slots", "not be shared", f"slot {slot}, which belongs to {step.writers[slot]!r}")
        step.writers[slot] = request.request_id
    if pool.slots is not None:
        for slot in request.slots:
            owner = pool.slots.owner_of(slot)
            if owner != request.request_id:
                held = "is free" if owner is None else f"belongs to {owner!r}"
                raise _error(request, "slots", "be allocated to it", f"slot {slot}, which {held}")


def _settle(request: StepRequest, pool: StatePool) -> bool:
    """Check `accepted` against the open drafts; returns whether the request had any."""
    most = pool.shape.verify_tokens
    _integer(request, "accepted", request.accepted, -(2**31))
    open_drafts = None if pool.slots is None else pool.slots.open_drafts(request.request_id)
    restarts = not request.has_initial_state or request.read_slot is not None
    if restarts:
        if request.accepted:
            raise _error(request, "accepted", "be 0 when it does not go on from its own state", str(request.accepted))
        return bool(open_drafts)
    if open_drafts == 0 and request.accepted:
        raise _error(request, "accepted", "be 0: its last step was no verify", str(request.accepted))
    if open_drafts and not 1 <= request.accepted <= open_drafts:
        raise _error(
            request, "accepted", f"be 1 to {open_drafts}, the tokens of its verify step", str(request.accepted)
        )
    if not 0 <= request.accepted <= most:
        takes = f"be 0 to {most} (1 + k_max)" if most else "be 0 with a pool that verifies nothing"
        raise _error(request, "accepted", takes, str(request.accepted))
    if pool.shape.rollback == "slots" and request.accepted > len(request.slots):
        raise _error(request, "accepted", f"be within its {len(request.slots)} slots", str(request.accepted))
    return bool(open_drafts)


def _row(request: StepRequest, first: int, shape: StateShape) -> Row:
    own = request.slots[0]
    resting = request.slots[request.accepted - 1] if request.accepted and shape.rollback == "slots" else own
    return Row(
        request_id=request.request_id,
        first_token=first,
        length=request.num_tokens,
        slots=request.slots,
        read_slot=resting if request.read_slot is None else request.read_slot,
        conv_read_slot=own if request.read_slot is None else request.read_slot,
        has_initial_state=request.has_initial_state,
        accepted=request.accepted,
        checkpoints=request.checkpoints,
    )


def _check_reads(step: Plan, request: StepRequest, pool: StatePool) -> None:
    if request.read_slot is None:
        return
    _check_slot(request, "read_slot", request.read_slot, pool)
    if request.kind == "verify":
        raise _error(request, "read_slot", "be None: a verify step goes on from its own state", str(request.read_slot))
    if not request.has_initial_state:
        raise _error(request, "read_slot", "be None without has_initial_state", str(request.read_slot))
    if request.read_slot in step.writers:
        raise _error(
            request,
            "read_slot",
            "not be written in the same step",
            f"{request.read_slot}, which belongs to {step.writers[request.read_slot]!r}",
        )
    if pool.slots is not None:
        owner = pool.slots.owner_of(request.read_slot)
        if owner is None:
            raise _error(request, "read_slot", "be allocated", f"slot {request.read_slot}, which is free")
        if pool.slots.open_drafts(owner):
            held = f"slot {request.read_slot} of {owner!r}, whose drafts are open"
            raise _error(request, "read_slot", "hold a settled state", held)


def _check_checkpoints(step: Plan, request: StepRequest, pool: StatePool) -> None:
    if request.checkpoints and request.kind != "prefill":
        raise _error(request, "checkpoints", "be absent", repr(request.checkpoints))
    for offset, slot in request.checkpoints:
        _integer(request, "checkpoints", offset, 1)
        if offset % CHECKPOINT_ALIGNMENT or offset > request.num_tokens:
            raise _error(
                request,
                "checkpoints",
                f"lie at multiples of {CHECKPOINT_ALIGNMENT} within its {request.num_tokens} tokens",
                f"offset {offset}",
            )
        _check_slot(request, "checkpoints", slot, pool)
        if slot in step.writers:
            raise _error(
                request,
                "checkpoints",
                "not name a slot that is written in this step",
                f"slot {slot}, which belongs to {step.writers[slot]!r}",
            )
        if pool.slots is not None:
            owner = pool.slots.owner_of(slot)
            if owner is None:
                raise _error(request, "checkpoints", "name allocated slots", f"slot {slot}, which is free")
            if owner != request.request_id and pool.slots.has_run(owner):
                held = f"slot {slot}, which belongs to request {owner!r}"
                raise _error(request, "checkpoints", "leave the states of other requests alone", held)
        step.writers[slot] = request.request_id


def _check_limits(step: Plan, limits: StepLimits) -> None:
    counts = {kind: len(rows) for kind, rows in step.rows.items()}
    measured = {
        "max_tokens": (step.num_tokens, limits.max_tokens),
        "max_requests": (sum(counts.values()), limits.max_requests),
        "max_prefills": (counts["prefill"], limits.max_prefills),
        "max_decodes": (counts["decode"], limits.max_decodes),
        "max_verifies": (counts["verify"], limits.max_verifies),
        "max_checkpoints": (sum(len(row.checkpoints) for row in step.rows["prefill"]), limits.max_checkpoints),
    }
    for name, (got, planned) in measured.items():
        if got > planned:
            raise ValueError(f"step must stay within {name} = {planned} as planned, got {got}")
