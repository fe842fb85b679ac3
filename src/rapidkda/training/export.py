"""From a checkpoint to the folder that ships: weights in bfloat16, configuration, MTP head, model card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from .card import model_card
from .checkpoint import HEAD, load_checkpoint
from .model import build, text_config

HEAD_FILE = "mtp.safetensors"  # where `rapidkda.engine.loading` looks for it
CARD_FILE = "README.md"


def export(checkpoint: Path, logs: Sequence[Path], out: Path, **changes: Any) -> None:
    """Write config.json, model.safetensors, mtp.safetensors and the model card.

    Args:
        checkpoint: folder of pieces.
        logs: `log.jsonl` files of the runs that led to it, in order.
        out: folder; files of the same names in it are replaced.
        changes: of `text_config`.

    As in released checkpoints of the family, conv1d, dt_bias and A_log stay float32.
    """
    model, head = build(text_config(**changes))
    load_checkpoint(checkpoint, model, head)
    kept = tuple(model._keep_in_fp32_modules_strict or ())
    for module in (model, head):
        _to_bfloat16(module, kept)
    out.mkdir(parents=True, exist_ok=True)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(out)
    tensors = {f"{HEAD}{name}": value.contiguous() for name, value in head.state_dict().items()}
    save_file(tensors, out / HEAD_FILE, metadata={"format": "pt"})
    (out / CARD_FILE).write_text(model_card(model.float(), head.float(), logs))


def _to_bfloat16(module: nn.Module, kept: tuple[str, ...]) -> None:
    for name, parameter in module.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.bfloat16()
