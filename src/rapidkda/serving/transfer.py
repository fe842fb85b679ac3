"""Moving a request's state between pools: preemption to the host, disaggregated serving, other tensor parallelism.

An exported state is cut into parts that are each sharded by head: the recurrent state, the convolution history of q, of
k and of v (which lie side by side in the pool but are three separate ranges of heads), and open draft records.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import checks, ops
from .config import StateShape
from .pool import LayerState, StatePool

PARTS = ("recurrent", "conv_q", "conv_k", "conv_v")


@dataclass(frozen=True, slots=True, eq=False)
class ExportedState:
    """One request's state in every layer, on the host.

    With open tokens, the recurrent state is the one before them: what was accepted earlier is in it, also where the
    pool deferred it.

    Attributes:
        layers: for each layer, part name to tensor, heads first: recurrent [HV, P, V, K] with P = 1, or the open
            tokens with slot per position; conv_q, conv_k [H, K, L] and conv_v [HV, V, L]; records [HV, n, 2K + V] when
            the replay form has n open tokens.
        open_drafts: tokens of the last verify step whose acceptance is not known yet.
        shape: of the pool it came from.
    """

    layers: tuple[dict[str, Tensor], ...]
    open_drafts: int
    shape: StateShape


def export_state(pool: StatePool, slots: Sequence[int], open_drafts: int = 0) -> ExportedState:
    """Copy a request's state out of its slots. The pool is unchanged.

    Args:
        slots: the request's slots.
        open_drafts: tokens of its last verify step that are still open (`SlotTable.open_drafts`).

    Raises ValueError where `open_drafts` is not what the pool's slot table says.
    """
    _check_slots(pool, slots, open_drafts)
    owner = None if pool.slots is None else pool.slots.owner_of(slots[0])
    if pool.slots is not None and owner is not None and open_drafts != pool.slots.open_drafts(owner):
        known = pool.slots.open_drafts(owner)
        raise ValueError(f"open_drafts must be the {known} tokens that are open for {owner!r}, got {open_drafts}")
    return ExportedState(
        tuple(_read(state, pool.shape, slots, open_drafts) for state in pool.layers), open_drafts, pool.shape
    )


def import_state(pool: StatePool, slots: Sequence[int], state: ExportedState, request_id: Hashable = None) -> None:
    """Write an exported state into slots; twice is as good as once.

    With `request_id`, its open drafts are entered in the pool's slot table.

    Raises ValueError that names the part which is missing or has another shape; then the pool is unchanged.
    """
    _check_slots(pool, slots, state.open_drafts)
    if len(state.layers) != len(pool.layers):
        raise ValueError(f"state must have {len(pool.layers)} layers like the pool, got {len(state.layers)}")
    for name in ("rollback", "max_drafts", "conv_width"):
        wanted, got = getattr(pool.shape, name), getattr(state.shape, name)
        if wanted != got and (state.open_drafts or name == "conv_width"):
            raise ValueError(f"state must come from a pool of {name} {wanted}, got {got}")
    for index, parts in enumerate(state.layers):
        _check_parts(f"state.layers[{index}]", parts, pool.shape, state.open_drafts)
    for target, parts in zip(pool.layers, state.layers):
        _write(target, pool.shape, slots, parts)
    if request_id is not None and pool.slots is not None:
        pool.slots.set_run(request_id)
        pool.slots.set_open(request_id, state.open_drafts)


def split_state(state: ExportedState, parts: int) -> list[ExportedState]:
    """Cut a state into one for each of `parts` tensor-parallel ranks, every part by head."""
    checks.integer("parts", parts, 1)
    shape = state.shape
    if shape.heads % parts:
        raise ValueError(f"parts must divide the {shape.heads} heads of the state, got {parts}")
    local = _reshaped(shape, shape.heads // parts, shape.value_heads // parts)
    return [
        ExportedState(
            tuple({name: value.chunk(parts)[rank] for name, value in layer.items()} for layer in state.layers),
            state.open_drafts,
            local,
        )
        for rank in range(parts)
    ]


def merge_states(states: Sequence[ExportedState]) -> ExportedState:
    """The whole state from those of all tensor-parallel ranks, in rank order."""
    if not states:
        raise ValueError("states must hold one state a rank, got none")
    first = states[0]
    kind = first.open_drafts, len(first.layers), replace(first.shape, record_rows=None)
    for rank, state in enumerate(states):
        if (state.open_drafts, len(state.layers), replace(state.shape, record_rows=None)) != kind:
            raise ValueError(f"states must come from pools of one shape and one step, got another from rank {rank}")
    layers = tuple(
        {name: torch.cat([state.layers[index][name] for state in states]) for name in first.layers[index]}
        for index in range(len(first.layers))
    )
    whole = _reshaped(first.shape, first.shape.heads * len(states), first.shape.value_heads * len(states))
    return ExportedState(layers, first.open_drafts, whole)


def _reshaped(shape: StateShape, heads: int, value_heads: int) -> StateShape:
    fields = {name: getattr(shape, name) for name in StateShape.__dataclass_fields__}
    return StateShape(**{**fields, "heads": heads, "value_heads": value_heads})


def _check_slots(pool: StatePool, slots: Sequence[int], open_drafts: int) -> None:
    most = pool.shape.verify_tokens
    if not 0 <= open_drafts <= most:
        raise ValueError(f"open_drafts must be 0 to {most} for this pool, got {open_drafts}")
    needed = max(1, open_drafts) if pool.shape.rollback == "slots" else 1
    if len(slots) < needed:
        raise ValueError(f"slots must hold at least {needed} slots, got {list(slots)}")
    for slot in slots:
        if slot == pool.pad_slot or not 0 <= slot < pool.num_slots:
            raise ValueError(f"slots must be in 0..{pool.num_slots - 1} and no padding marker, got {slot}")


def _history(state: LayerState, shape: StateShape, slot: int) -> Tensor:
    """The convolution history of a slot as a view [C, L]."""
    return state.conv[slot].T if shape.conv_channels_last else state.conv[slot]


def _read(state: LayerState, shape: StateShape, slots: Sequence[int], open_drafts: int) -> dict[str, Tensor]:
    positions = max(1, open_drafts) if shape.rollback == "slots" else 1
    length = shape.conv_width - 1 + max(0, open_drafts - 1)
    heads = (shape.heads, shape.heads, shape.value_heads)
    history = _history(state, shape, slots[0])[:, :length].split(list(shape.conv_parts))
    states = [state.recurrent[slot] for slot in slots[:positions]]
    records = None
    if state.records is not None and open_drafts:
        records = state.records[slots[0], :open_drafts]
        if state.held is not None:
            states[0], records = _before_the_open(states[0], state.records[slots[0]], state.held[slots[0]], open_drafts)
    parts = {"recurrent": torch.stack(states, dim=1)}
    parts.update(
        (name, part.reshape(count, -1, length)) for name, part, count in zip(PARTS[1:], history, heads, strict=True)
    )
    if records is not None:
        parts["records"] = records.transpose(0, 1)
    return {name: value.detach().clone(memory_format=torch.contiguous_format).cpu() for name, value in parts.items()}


def _before_the_open(state: Tensor, records: Tensor, held: Tensor, open_drafts: int) -> tuple[Tensor, Tensor]:
    """A deferred state [HV, V, K] with the first `held` [HV] of the slot's records [R, HV, 2K + V] applied, and the
    records of the open tokens, which follow them. The pool is unchanged."""
    held = held.clamp(0, records.shape[0] - open_drafts)
    whole, one = state.clone()[None], torch.ones(1, dtype=torch.int32, device=state.device)
    before = (held - 1).clamp(min=0)[None]  # and one that was accepted
    ops.commit(state=whole, records=records[None], slots=one - 1, accepted=one, held=before, backend="torch")
    whole = torch.where((held > 0)[:, None, None], whole[0], state)
    rows = (held + torch.arange(open_drafts, device=held.device)[:, None]).long()  # [n, HV]
    return whole, records.gather(0, rows[:, :, None].expand(-1, -1, records.shape[2]))


def _expected(shape: StateShape, open_drafts: int) -> dict[str, tuple[int, ...]]:
    positions = max(1, open_drafts) if shape.rollback == "slots" else 1
    length = shape.conv_width - 1 + max(0, open_drafts - 1)
    parts: dict[str, tuple[int, ...]] = {
        "recurrent": (shape.value_heads, positions, shape.value_dim, shape.key_dim),
        "conv_q": (shape.heads, shape.key_dim, length),
        "conv_k": (shape.heads, shape.key_dim, length),
        "conv_v": (shape.value_heads, shape.value_dim, length),
    }
    if shape.has_records and open_drafts:
        parts["records"] = (shape.value_heads, open_drafts, 2 * shape.key_dim + shape.value_dim)
    return parts


def _check_parts(name: str, parts: dict[str, Tensor], shape: StateShape, open_drafts: int) -> None:
    for part, extents in _expected(shape, open_drafts).items():
        if part not in parts:
            raise ValueError(f"{name} must hold the part {part!r}, got only {sorted(parts)}")
        value = checks.tensor(f"{name}[{part!r}]", parts[part])
        checks.shape(f"{name}[{part!r}]", value, extents, "heads first")


def _write(state: LayerState, shape: StateShape, slots: Sequence[int], parts: dict[str, Tensor]) -> None:
    for position, slot in zip(range(parts["recurrent"].shape[1]), slots):
        state.recurrent[slot].copy_(parts["recurrent"][:, position])
    history = torch.cat([parts[name].flatten(0, 1) for name in PARTS[1:]])  # [C, length]
    _history(state, shape, slots[0])[:, : history.shape[1]].copy_(history)
    if state.records is not None and "records" in parts:
        state.records[slots[0], : parts["records"].shape[1]].copy_(parts["records"].transpose(0, 1))
    if state.held is not None:
        state.held[slots[0]] = 0
