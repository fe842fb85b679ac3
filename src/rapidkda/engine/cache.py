"""What the attention layers keep of one request.

The class answers to the calls that the attention modules of transformers make on a cache. Its buffers grow by doubling,
so that a new token does not copy all earlier ones, and rejected drafts are dropped by moving the end back.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

FIRST_CAPACITY = 64  # tokens


class Growing:
    """A tensor that grows along its second last dimension, the tokens."""

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def append(self, new: Tensor) -> Tensor:
        """Add tokens [..., n, D]; returns all of them [..., length, D], a view."""
        end = self.length + new.shape[-2]
        buffer = self._buffer
        if buffer is None or end > buffer.shape[-2]:
            capacity = max(FIRST_CAPACITY, end if buffer is None else max(end, 2 * buffer.shape[-2]))
            grown = new.new_empty((*new.shape[:-2], capacity, new.shape[-1]))
            if buffer is not None:
                grown[..., : self.length, :] = buffer[..., : self.length, :]
            self._buffer = buffer = grown
        buffer[..., self.length : end, :] = new
        self.length = end
        return buffer[..., :end, :]

    def view(self) -> Tensor | None:
        return None if self._buffer is None else self._buffer[..., : self.length, :]

    def crop(self, length: int) -> None:
        self.length = min(self.length, length)


class LayerCache:
    """One attention layer's part: keys, values, and the indexer's rows where there is an indexer."""

    def __init__(self) -> None:
        self._keys, self._values, self._indexer = Growing(), Growing(), Growing()

    @property
    def keys(self) -> Tensor | None:
        return self._keys.view()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self._keys, self._values, self._indexer))

    def get_seq_length(self) -> int:
        """As the modules call it."""
        return self._keys.length

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._keys.append(keys), self._values.append(values)

    def update_indexer(self, rows: Tensor) -> Tensor:
        return self._indexer.append(rows)

    def crop(self, length: int) -> None:
        for part in (self._keys, self._values, self._indexer):
            part.crop(length)


class AttentionCache:
    """The caches of all attention layers, for one request.

    Args:
        layers: indices of the attention layers in the model.
    """

    def __init__(self, layers: Iterable[int]):
        self.layers: dict[int, LayerCache] = {index: LayerCache() for index in layers}

    @property
    def nbytes(self) -> int:
        """Bytes allocated, room to grow included."""
        return sum(layer.nbytes for layer in self.layers.values())

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **kwargs: object) -> tuple[Tensor, Tensor]:
        """As the modules call it: keys and values [1, heads, n, D] of new tokens to those of all tokens.

        `kwargs` are what newer releases of transformers hand on to caches that need more.
        """
        return self.layers[layer_idx].update(keys, values)

    def update_indexer(self, rows: Tensor, layer_idx: int) -> Tensor:
        """As the modules call it: indexer rows [1, n, D] of new tokens to those of all tokens."""
        return self.layers[layer_idx].update_indexer(rows)

    def length(self, layer_idx: int) -> int:
        """Tokens in a layer."""
        return self.layers[layer_idx].get_seq_length()

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        for layer in self.layers.values():
            layer.crop(length)


def causal_mask(length: int, cached: int, dtype: torch.dtype, device: torch.device, *, additive: bool) -> Tensor | None:
    """Mask [1, 1, length, cached + length] of new tokens after cached ones; None for one token, which sees all."""
    if length == 1:
        return None
    visible = torch.ones(length, cached + length, dtype=torch.bool, device=device).tril(cached)[None, None]
    if not additive:
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
