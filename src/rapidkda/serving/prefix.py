"""Prefix-cache checkpoints: where they can be taken, and how long a cached prefix can be used."""

from __future__ import annotations

import logging
from collections.abc import Collection

from .. import checks
from ..problem import CHECKPOINT_ALIGNMENT

log = logging.getLogger("rapidkda")


def checkpoint_offsets(computed: int, num_tokens: int, interval: int) -> tuple[int, ...]:
    """Offsets into a prefill chunk at which the prefix grid `interval`, 2 * `interval`, ... of its request is met.

    Args:
        computed: tokens of the request before this chunk.
        num_tokens: tokens of the chunk.
        interval: tokens between checkpoints, a multiple of 16.

    Returns () and logs a warning when the chunk reaches a grid point that it cannot export, because it does not start
    at a multiple of 16.
    """
    checks.integer("computed", computed, 0)
    checks.integer("num_tokens", num_tokens, 0)
    if checks.integer("interval", interval, 1) % CHECKPOINT_ALIGNMENT:
        raise ValueError(f"interval must be a multiple of {CHECKPOINT_ALIGNMENT} tokens, got {interval}")
    first = (computed // interval + 1) * interval
    offsets = tuple(range(first - computed, num_tokens + 1, interval))
    if offsets and computed % CHECKPOINT_ALIGNMENT:
        log.warning(
            "no prefix checkpoint from a chunk that starts at token %d: chunks must start at multiples of %d",
            computed,
            CHECKPOINT_ALIGNMENT,
        )
        return ()
    return offsets


def warn_if_unreachable(prompt_tokens: int, interval: int) -> bool:
    """Whether a prompt is too short for any checkpoint; says so in the log, so that 0 % hits have an explanation."""
    if prompt_tokens >= interval:
        return False
    log.warning(
        "no prefix checkpoint can exist for a prompt of %d tokens: checkpoints are %d tokens apart",
        prompt_tokens,
        interval,
    )
    return True


def usable_prefix(attention_hit: int, checkpoints: Collection[int]) -> int:
    """Tokens of a cached prefix that a request may skip.

    A recurrent layer can only start where its state was kept: the longest of `checkpoints` (token counts with a stored
    state) within the `attention_hit` tokens that the attention layers' cache holds; 0 if there is none.
    """
    checks.integer("attention_hit", attention_hit, 0)
    return max((tokens for tokens in checkpoints if tokens <= attention_hit), default=0)
