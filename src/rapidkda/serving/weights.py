"""Checkpoint tensors of a KDA layer: Hugging Face's names in both model families, whole or one rank's part.

Sharding: q, k, v, b, f_b, g_b, dt_bias, A_log and the convolution by head, o_proj by input column (its outputs are
summed over ranks), f_a, g_a and the norm replicated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

# Checkpoint name to the layer's own; glm5_next and kimi_linear checkpoints have no `forget_gate.`, the modules have.
NAMES = {
    "q_proj.weight": "q",
    "k_proj.weight": "k",
    "v_proj.weight": "v",
    "b_proj.weight": "b",
    "f_a_proj.weight": "f_a",
    "f_b_proj.weight": "f_b",
    "g_a_proj.weight": "g_a",
    "g_b_proj.weight": "g_b",
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "conv1d.weight": "conv",
    "q_conv1d.weight": "q_conv",
    "k_conv1d.weight": "k_conv",
    "v_conv1d.weight": "v_conv",
    "o_norm.weight": "o_norm",
    "o_proj.weight": "o_proj",
}
CONVOLUTIONS = ("q_conv", "k_conv", "v_conv")
OPTIONAL = ("A_log", "dt_bias")  # absent with some bounded gates: amplitude 1, bias 0


@dataclass(frozen=True, slots=True)
class WeightShape:
    """Dimensions of the unsharded layer, and this rank."""

    hidden_size: int
    heads: int
    head_dim: int
    conv_width: int
    tp_rank: int = 0
    tp_size: int = 1


class Source:
    """Tensors by name from a mapping, a safetensors file, or a folder of them. A context manager."""

    def __init__(self, source: Mapping[str, Tensor] | str | Path):
        self._stack = ExitStack()
        self._readers: dict[str, Callable[[], Tensor]] = {}
        if isinstance(source, Mapping):
            for name, value in source.items():
                self._readers[name] = lambda value=value: value  # type: ignore[misc]
            return
        for file in _files(Path(source)):
            try:
                handle: Any = self._stack.enter_context(safe_open(str(file), framework="pt"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise ValueError(f"weights must be safetensors files, got {str(file)!r}: {error}") from error
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                self._readers[name] = lambda handle=handle, name=name: handle.get_tensor(name)  # type: ignore[misc]

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def names(self, prefix: str) -> list[str]:
        """Names below a prefix, with it."""
        return [name for name in self._readers if name.startswith(prefix)]

    def read(self, name: str) -> Tensor:
        return self._readers[name]()


def read(
    source: Mapping[str, Tensor] | str | Path, prefix: str, shape: WeightShape, optional: bool
) -> Iterator[tuple[str, Tensor]]:
    """This rank's tensors as (own name, tensor), one at a time; the convolution comes as q_conv, k_conv, v_conv [P, W].

    Raises ValueError that names the tensor: unknown below the prefix, missing, or of another shape.
    """
    with Source(source) as tensors:
        present: dict[str, str] = {}
        for name in tensors.names(prefix):
            own = NAMES.get(name.removeprefix(prefix).removeprefix("forget_gate."))
            if own is None:
                raise ValueError(f"weights must be those of a KDA layer below {prefix!r}, got {name!r}")
            if own in present:
                raise ValueError(f"weights must name each tensor once, got {name!r} and {present[own]!r}")
            present[own] = name
        _check_present(present, prefix, optional)
        for own, name in present.items():
            value = tensors.read(name)
            if own == "conv":
                yield from _split_convolution(name, value, shape)
            else:
                yield own, _shard(own, name, value, shape)


def _check_present(present: Mapping[str, str], prefix: str, optional: bool) -> None:
    needed = {own: name for name, own in NAMES.items() if own != "conv"}
    if "conv" in present:
        extra = [present[own] for own in CONVOLUTIONS if own in present]
        if extra:
            raise ValueError(f"weights must hold one merged or three convolutions, got {extra} and {present['conv']!r}")
        for own in CONVOLUTIONS:
            del needed[own]
    missing = [
        prefix + name for own, name in needed.items() if own not in present and not (optional and own in OPTIONAL)
    ]
    if missing:
        raise ValueError(f"weights must hold {', '.join(missing)}, got {sorted(present.values())}")


def _split_convolution(name: str, value: Tensor, shape: WeightShape) -> Iterator[tuple[str, Tensor]]:
    """q, k and v lie side by side, each to be sharded by head: the merged weight is never cut as one block."""
    if value.shape[0] % 3:
        raise ValueError(f"{name} must have q, k and v channels in equal number, got shape {list(value.shape)}")
    for own, part in zip(CONVOLUTIONS, value.chunk(3)):
        yield own, _shard(own, name, part, shape)


def _shard(own: str, name: str, value: Tensor, shape: WeightShape) -> Tensor:
    """The rank's part of a whole tensor, or the tensor itself if it is the rank's part already."""
    heads, dim, hidden = shape.heads, shape.head_dim, shape.hidden_size
    if own == "A_log":
        value = value.reshape(-1)  # [H] or [1, 1, H, 1]
    if own in CONVOLUTIONS and value.ndim == 3:
        value = value.squeeze(1)  # [P, 1, W]
    by_head: dict[str, tuple[int, ...]] = {
        "q": (heads * dim, hidden),
        "k": (heads * dim, hidden),
        "v": (heads * dim, hidden),
        "b": (heads, hidden),
        "f_b": (heads * dim, dim),
        "g_b": (heads * dim, dim),
        "dt_bias": (heads * dim,),
        "A_log": (heads,),
        **dict.fromkeys(CONVOLUTIONS, (heads * dim, shape.conv_width)),
    }
    replicated: dict[str, tuple[int, ...]] = {"f_a": (dim, hidden), "g_a": (dim, hidden), "o_norm": (dim,)}
    if own in replicated:
        return _expect(name, value, replicated[own], None)
    axis, whole = (1, (hidden, heads * dim)) if own == "o_proj" else (0, by_head[own])
    local = list(whole)
    local[axis] //= shape.tp_size
    if shape.tp_size > 1 and tuple(value.shape) == whole:
        value = value.narrow(axis, shape.tp_rank * local[axis], local[axis])
    return _expect(name, value, tuple(local), whole)


def _expect(name: str, value: Tensor, local: tuple[int, ...], whole: tuple[int, ...] | None) -> Tensor:
    if tuple(value.shape) != local:
        either = "" if whole in (None, local) else f" (this rank's part of {list(whole or ())})"
        raise ValueError(f"{name} must have shape {list(local)}{either}, got {list(value.shape)}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a float tensor, got {value.dtype}")
    return value


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"weights must be a safetensors file or a folder that holds some, got {str(path)!r}")
    return files
