from dataclasses import dataclass


@dataclass(frozen=True)
class MambaSpec:
    num_prefill_checkpoint_blocks: int = 0
    prefill_checkpoint_alignment: int | None = None
