"""Checkpoints of the float32 weights, in pieces that are small enough for any way of moving files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

PIECE = 15 << 20  # bytes
MODEL, HEAD = "model.", "mtp."


def save_checkpoint(folder: Path, model: nn.Module, head: nn.Module) -> None:
    """Write `ckpt.00`, `ckpt.01`, ... ; a checkpoint that is there is replaced only when the new one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"{MODEL}{name}": value for name, value in model.state_dict().items()}
    weights |= {f"{HEAD}{name}": value for name, value in head.state_dict().items()}
    data = save({name: value.detach().cpu().contiguous() for name, value in weights.items()})
    pieces = [data[start : start + PIECE] for start in range(0, len(data), PIECE)]
    for index, piece in enumerate(pieces):
        (folder / f"new.{index:02d}").write_bytes(piece)
    for index in range(len(pieces)):
        (folder / f"new.{index:02d}").replace(folder / f"ckpt.{index:02d}")


def load_checkpoint(folder: Path, model: nn.Module, head: nn.Module) -> None:
    """Load what `save_checkpoint` wrote. Raises ValueError without pieces, RuntimeError for another model's."""
    pieces = sorted(folder.glob("ckpt.[0-9][0-9]"))
    if not pieces:
        raise ValueError(f"checkpoint folder must hold ckpt.00, got {folder}")
    weights = load(b"".join(piece.read_bytes() for piece in pieces))
    model.load_state_dict(_below(MODEL, weights))
    head.load_state_dict(_below(HEAD, weights))


def _below(prefix: str, weights: dict[str, Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
