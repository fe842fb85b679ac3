from dataclasses import dataclass

from torch import Tensor


@dataclass
class MambaPrefillCheckpointMetadata:
    checkpoint_offsets: Tensor
    state_indices: Tensor
    offsets: list[int] | None = None
