"""State pools: the recurrent states, convolution histories and draft records of all KDA layers, by slot."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .. import checks, env
from .config import StateShape
from .slots import SlotTable

OnReuse = Literal["keep", "zero", "poison"]
ON_REUSE: tuple[OnReuse, ...] = ("keep", "zero", "poison")
WILD = 2**31 - 1  # the NaN of integers


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """The pools of one layer. Slot strides are free, so that an engine's padded pages can be wrapped as they are.

    Attributes:
        recurrent: [S, HV, V, K], float32 or bfloat16.
        conv: convolution inputs, oldest first, [S, L, C] or [S, C, L]; L = W - 1 + k_max.
        records: float32 [S, R, HV, 2K + V] where steps are verified by replay, else None.
        held: int32 [S, HV], dense, where states are deferred, else None: records before those of the last verify step.
            Whoever copies a slot with open drafts copies its records and its row of `held` too.
    """

    recurrent: Tensor
    conv: Tensor
    records: Tensor | None = None
    held: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """By name, without the absent ones."""
        named = {"recurrent": self.recurrent, "conv": self.conv, "records": self.records, "held": self.held}
        return {name: value for name, value in named.items() if value is not None}


def plan_bytes(shape: StateShape, num_slots: int, layers: int = 1) -> int:
    """Bytes that `StatePool(shape, num_slots, layers)` allocates, exactly."""
    sizes = [(shape.recurrent(num_slots), shape.state_dtype), (shape.conv(num_slots), shape.conv_dtype)]
    if shape.has_records:
        sizes.append((shape.records(num_slots), torch.float32))
    if shape.defers:
        sizes.append((shape.held(num_slots), torch.int32))
    return layers * sum(math.prod(extents) * dtype.itemsize for extents, dtype in sizes)


class StatePool:
    """One slot table and one `LayerState` for every KDA layer of a model.

    Args:
        shape: the state of one request in one layer.
        num_slots: rows of every pool. A request takes `shape.slots_per_request` of them.
        layers: KDA layers.
        device: where the pools live.
        pad_slot: the padding marker: 0 for pools whose slot 0 is never a request's (vLLM), -1 where slot 0 is real.
        on_reuse: what happens to a slot when it is given out again: "keep" what is there (nothing depends on it:
            a fresh request starts from zero by selection), "zero" it, or "poison" it with NaN (default with
            RAPIDKDA_CHECK=1).
    """

    def __init__(
        self,
        shape: StateShape,
        num_slots: int,
        layers: int = 1,
        *,
        device: torch.device | str = "cpu",
        pad_slot: int = -1,
        on_reuse: OnReuse | None = None,
    ):
        checks.integer("layers", layers, 1)
        if on_reuse is None:
            on_reuse = "poison" if env.check_device_values() else "keep"
        checks.choice("on_reuse", on_reuse, ON_REUSE)
        self.shape = shape
        self.on_reuse: OnReuse = on_reuse
        self.pad_slot = pad_slot
        self.slots: SlotTable | None = SlotTable(num_slots, pad_slot)
        self.num_slots = num_slots
        self.device = torch.device(device)
        self.layers = tuple(_allocate(shape, num_slots, self.device) for _ in range(layers))

    @classmethod
    def wrap(cls, shape: StateShape, layers: Sequence[LayerState], *, pad_slot: int = -1) -> StatePool:
        """A pool over tensors that an engine owns and whose slots it hands out itself (`slots` is None).

        Raises ValueError or TypeError that names the tensor whose shape or dtype differs from `shape`.
        """
        if not layers:
            raise ValueError("layers must hold at least one LayerState, got none")
        pool = cls.__new__(cls)
        pool.shape = shape
        pool.on_reuse = "keep"
        pool.pad_slot = checks.integer("pad_slot", pad_slot, -1)
        pool.slots = None
        pool.num_slots = layers[0].recurrent.shape[0]
        pool.device = layers[0].recurrent.device
        pool.layers = tuple(layers)
        for index, state in enumerate(layers):
            _check(f"layers[{index}]", state, shape, pool.num_slots, pool.device)
        return pool

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(value.nbytes for state in self.layers for value in state.tensors().values())

    def allocate(self, owner: Hashable, count: int | None = None) -> tuple[int, ...]:
        """Slots for a request (default `shape.slots_per_request`), or one for a prefix checkpoint (`count=1`).

        Raises `SlotsExhausted` when the pool is full and ValueError when the owner already holds slots.
        """
        slots = self._table().allocate(owner, self.shape.slots_per_request if count is None else count)
        if self.on_reuse != "keep":
            self.fill(slots, 0.0 if self.on_reuse == "zero" else math.nan)
        return slots

    def free(self, owner: Hashable) -> None:
        """Take back the slots of a request or checkpoint."""
        slots = self._table().free(owner)
        if self.on_reuse == "poison":
            self.fill(slots, math.nan)

    def fill(self, slots: Sequence[int], value: float) -> None:
        """Set everything in some slots, in all layers, to one value; counters that cannot hold it to a wild one."""
        index = torch.tensor(slots, dtype=torch.int64, device=self.device)
        for state in self.layers:
            for tensor in state.tensors().values():
                tensor.index_fill_(0, index, value if tensor.is_floating_point() or _counts(value) else WILD)

    def _table(self) -> SlotTable:
        if self.slots is None:
            raise ValueError("slots of a wrapped pool are its engine's, so it cannot allocate or free them")
        return self.slots


def _counts(value: float) -> bool:
    return 0 <= value <= WILD and value == int(value)


def _allocate(shape: StateShape, num_slots: int, device: torch.device) -> LayerState:
    return LayerState(
        recurrent=torch.zeros(shape.recurrent(num_slots), dtype=shape.state_dtype, device=device),
        conv=torch.zeros(shape.conv(num_slots), dtype=shape.conv_dtype, device=device),
        records=torch.zeros(shape.records(num_slots), device=device) if shape.has_records else None,
        held=torch.zeros(shape.held(num_slots), dtype=torch.int32, device=device) if shape.defers else None,
    )


def _check(name: str, state: LayerState, shape: StateShape, num_slots: int, device: torch.device) -> None:
    expected = {
        "recurrent": (shape.recurrent(num_slots), shape.state_dtype, "[S, HV, V, K]"),
        "conv": (shape.conv(num_slots), shape.conv_dtype, "[S, L, C]" if shape.conv_channels_last else "[S, C, L]"),
    }
    if shape.has_records:
        meaning = "[S, R, HV, 2K + V], R = record_rows"
        expected["records"] = (shape.records(num_slots), torch.float32, meaning)
    if shape.defers:
        if state.held is None:
            wanted = f"{shape.records_per_slot} records a slot (record_rows) for {1 + shape.max_drafts} tokens a step"
            raise TypeError(f"{name}.held must be a torch.Tensor with {wanted}, got None")
        expected["held"] = (shape.held(num_slots), torch.int32, "[S, HV]")
    for part, (extents, dtype, meaning) in expected.items():
        value = checks.tensor(f"{name}.{part}", getattr(state, part))
        checks.shape(f"{name}.{part}", value, extents, meaning)
        checks.dtype(f"{name}.{part}", value, (dtype,))
        checks.dense_inner(f"{name}.{part}", value)
        if value.device != device:
            raise ValueError(f"{name}.{part} must be on {device} like the first pool, got {value.device}")
    if not shape.has_records and state.records is not None:
        raise ValueError(f"{name}.records must be None for a shape without records, got a tensor")
    if state.held is None:
        return
    if not shape.defers:
        raise ValueError(f"{name}.held must be None unless states are deferred, got a tensor")
    if not state.held.is_contiguous():
        raise ValueError(f"{name}.held must be contiguous, got strides {list(state.held.stride())}")
