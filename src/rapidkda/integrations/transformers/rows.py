"""The token rows of one forward pass: the real tokens of a [B, T] batch as segments of one packed token axis.

Padding is taken out before a layer and put back, as zeros, after it. So a padding token changes no state whatever
stands before it: left padding, right padding, and padding between what a cache holds and the tokens that follow.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...segments import Segments


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Which rows of a flattened [B * T] batch are tokens, and which sequence each belongs to.

    Attributes:
        batch, tokens: B and T of the forward pass.
        segments: the N sequences on the packed axis of real tokens; N = B, but for packed sequences.
        slots: int32 [N], the row of each sequence in the cache.
        cu_seqlens, cu_seqlens_cpu: int32 [N + 1], the boundaries of the segments.
        real: int64 [real tokens], their places in the flattened batch; None when there is no padding.
    """

    batch: int
    tokens: int
    segments: Segments
    slots: Tensor
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    real: Tensor | None

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, D] to the real tokens [n, D]."""
        flat = x.flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)

    def unpack(self, y: Tensor) -> Tensor:
        """[n, D] back to [B, T, D], zeros at padding."""
        if self.real is not None:
            y = y.new_zeros(self.batch * self.tokens, y.shape[1]).index_copy(0, self.real, y)
        return y.view(self.batch, self.tokens, -1)

    def newest(self, x: Tensor, before: Tensor | None, width: int) -> Tensor:
        """The newest inputs of each sequence, [N, C, L], oldest first.

        Without padding, the last min(T, width) of x, which `update_conv_state` of the cache joins to what it holds.
        With it, exactly `width`: entries of `before` [N, C, width] (zeros if None) where a sequence has fewer tokens.
        """
        if self.real is None:
            return x.view(self.batch, self.tokens, -1)[:, -width:].transpose(1, 2)
        sequence = torch.arange(self.segments.count, device=x.device)[:, None]
        end = (self.segments.first_token + self.segments.length)[:, None]
        position = end - width + torch.arange(width, device=x.device)
        return self._with_history(x, before, width)[self._source(sequence, position, width)].transpose(1, 2)

    def windows(self, x: Tensor, before: Tensor | None, width: int) -> Tensor:
        """Each token's last `width` inputs, [n, C, width], oldest first; differentiable.

        `before` [N, C, width - 1] is what stands before each sequence, zeros if None.
        """
        history = width - 1
        if before is not None and self.real is None and self.tokens == 1:
            return torch.cat([before, x.unsqueeze(2)], dim=2)
        sequence = torch.repeat_interleave(
            torch.arange(self.segments.count, device=x.device), self.segments.length, output_size=x.shape[0]
        )[:, None]
        position = torch.arange(x.shape[0], device=x.device)[:, None] - history + torch.arange(width, device=x.device)
        return self._with_history(x, before, history)[self._source(sequence, position, history)].transpose(1, 2)

    def _with_history(self, x: Tensor, before: Tensor | None, width: int) -> Tensor:
        """[N * width + n, C]: the histories of all sequences, then the tokens."""
        if before is None:
            before = x.new_zeros(self.segments.count, x.shape[1], width)
        return torch.cat([before.transpose(1, 2).flatten(0, 1), x])

    def _source(self, sequence: Tensor, position: Tensor, width: int) -> Tensor:
        """Rows of `_with_history` that hold packed `position`s, which may lie up to `width` before their sequence."""
        local = position - self.segments.first_token[sequence]
        return torch.where(local >= 0, self.segments.count * width + position, (sequence + 1) * width + local)


def token_rows(hidden: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None = None) -> TokenRows:
    """The rows of hidden states [B, T, D].

    Args:
        attention_mask: [B, T], nonzero where a token is real, or None. A single token is never padding (transformers
            drops its mask, too), so its mask is not read. Otherwise the mask is read back from the device once a
            forward pass, whatever the number of layers.
        cu_seqlens: boundaries [N + 1] of sequences packed into one row.
    """
    batch, tokens = hidden.shape[:2]
    if cu_seqlens is not None:
        return _packed(cu_seqlens, batch, tokens, hidden.device, attention_mask)
    if attention_mask is None or tokens == 1:
        return _dense(batch, tokens, hidden.device)
    if tuple(attention_mask.shape) != (batch, tokens):
        raise ValueError(
            f"attention_mask must have shape [B, T] = [{batch}, {tokens}], got {list(attention_mask.shape)}"
        )
    # All layers get the same mask object. Its rows are kept on it, for as long as it lives and does not change;
    # inference tensors do not record changes.
    if attention_mask.is_inference():
        return _masked(attention_mask, hidden.device)
    kept: tuple[int, torch.device, TokenRows] | None = getattr(attention_mask, "_rapidkda_rows", None)
    if kept is None or kept[:2] != (attention_mask._version, hidden.device):
        kept = (attention_mask._version, hidden.device, _masked(attention_mask, hidden.device))
        attention_mask._rapidkda_rows = kept  # type: ignore[attr-defined]
    return kept[2]


@functools.lru_cache(maxsize=64)
def _dense(batch: int, tokens: int, device: torch.device) -> TokenRows:
    return _rows(batch, tokens, [tokens] * batch, device, None)


@torch.inference_mode(False)
def _masked(attention_mask: Tensor, device: torch.device) -> TokenRows:
    batch, tokens = attention_mask.shape
    mask = attention_mask.detach().cpu() != 0
    if bool(mask.all()):
        return _dense(batch, tokens, device)
    return _rows(batch, tokens, mask.sum(1).tolist(), device, mask.flatten().nonzero().squeeze(1))


def _packed(
    cu_seqlens: Tensor, batch: int, tokens: int, device: torch.device, attention_mask: Tensor | None
) -> TokenRows:
    if batch != 1:
        raise ValueError(f"cu_seqlens needs sequences packed into a batch of 1, got a batch of {batch}")
    if attention_mask is not None and not bool((attention_mask != 0).all()):
        raise ValueError("attention_mask must not mask tokens when cu_seqlens is given")
    boundaries = cu_seqlens.detach().cpu().to(torch.int64)
    lengths = boundaries.diff().tolist()
    if boundaries.ndim != 1 or not lengths or int(boundaries[0]) != 0 or min(lengths) < 0 or sum(lengths) != tokens:
        raise ValueError(
            f"cu_seqlens must start at 0, never decrease and end at the {tokens} tokens, got {boundaries.tolist()}"
        )
    return _rows(1, tokens, lengths, device, None)


@torch.inference_mode(False)  # autograd may keep these index tensors, whatever mode first asks for them
def _rows(batch: int, tokens: int, lengths: list[int], device: torch.device, real: Tensor | None) -> TokenRows:
    segments = Segments.from_lengths(lengths, device)
    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    return TokenRows(
        batch=batch,
        tokens=tokens,
        segments=segments,
        slots=torch.arange(len(lengths), dtype=torch.int32, device=device),
        cu_seqlens=cu_seqlens.to(device),
        cu_seqlens_cpu=cu_seqlens,
        real=None if real is None else real.to(device),
    )
