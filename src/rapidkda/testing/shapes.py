"""Named workloads, shared by the tests, `rapidkda verify` and `rapidkda bench`.

Heads are per rank: GLM-5.3-Flash has 64 KDA heads (64, 32, 16 and 8 under tensor parallelism of 1, 2, 4 and 8),
Kimi-K3 96 (12, 6 and 3 on many ranks), Kimi-Linear 32. The head dim of every released model is 128.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """Segments of a step and the head layout of a rank. `value_heads` None: as many as `heads`."""

    name: str
    seq_lens: tuple[int, ...]
    heads: int
    value_heads: int | None = None
    key_dim: int = 128
    value_dim: int = 128

    @property
    def tokens(self) -> int:
        return sum(self.seq_lens)

    @property
    def hv(self) -> int:
        """Value heads."""
        return self.heads if self.value_heads is None else self.value_heads

    def with_heads(self, heads: int) -> Shape:
        """The same segments with `heads` query and value heads."""
        return replace(self, heads=heads, value_heads=None)


# What serving runs: throughput, long context, and ragged steps.
PREFILL: tuple[Shape, ...] = (
    Shape("8x2048_h16", (2048,) * 8, 16),
    Shape("4x8192_h16", (8192,) * 4, 16),
    Shape("1x16384_h16", (16384,), 16),
    Shape("2x8192_h16", (8192,) * 2, 16),
    Shape("1x65536_h16", (65536,), 16),
    Shape("1x2048_h16", (2048,), 16),
    Shape("8x256_h16", (256,) * 8, 16),
    Shape("1x16384_h8", (16384,), 8),
    Shape("1x16384_h32", (16384,), 32),
    Shape("1x8192_h64", (8192,), 64),
    Shape("8x1024_h64", (1024,) * 8, 64),
    Shape("ragged_h64", (1300, 547, 2048, 963, 271, 3063), 64),
    Shape("4x8192_h64", (8192,) * 4, 64),
    Shape("1x512_h64", (512,), 64),
)

# Small enough for the float64 reference on a laptop, ragged enough to meet every tail.
SMALL: tuple[Shape, ...] = (
    Shape("one_token", (1,), 2),
    Shape("one_chunk", (64,), 2),
    Shape("chunk_and_tail", (130,), 2),
    Shape("ragged_small", (1, 64, 0, 3, 17, 63, 65), 2),
    Shape("three_heads", (40, 33), 3),
    Shape("grouped_values", (65, 20), 2, value_heads=4),
    Shape("narrow_keys", (70,), 2, key_dim=64),
    Shape("narrow_values", (70,), 2, value_dim=64),
    Shape("wide_heads", (35,), 1, key_dim=256, value_dim=256),
)

# Larger ones for `rapidkda verify`: many chunks, and every form that a GPU backend's kernels have.
LARGE: tuple[Shape, ...] = (
    Shape("long", (1024,), 2),
    Shape("ragged_long", (300, 7, 517, 96), 2),
    Shape("one_sequence", (2048,), 1),  # leaves a GPU idle unless it is cut into parts
    Shape("many_sequences", (33,) * 24, 4),  # more chains than pairs of multiprocessors
)

DECODE_BATCHES: tuple[int, ...] = (1, 8, 64, 256, 1024)
VERIFY_DRAFTS: tuple[int, ...] = (1, 3, 7)


def by_name(name: str) -> Shape:
    """The workload of that name, or a ValueError that lists the names."""
    known = {shape.name: shape for shape in (*PREFILL, *SMALL, *LARGE)}
    if name not in known:
        raise ValueError(f"shape must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def decode_shape(batch: int, heads: int, draft_tokens: int = 0) -> Shape:
    """One token (plus drafts) for each of `batch` requests."""
    kind = f"verify{draft_tokens}" if draft_tokens else "decode"
    return Shape(f"{kind}_b{batch}_h{heads}", (1 + draft_tokens,) * batch, heads)
