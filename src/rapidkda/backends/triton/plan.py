"""What a prefill call runs: tiles, parts, and where everything lies in the workspace. Plain arithmetic.

A segment is cut into tiles of C = 16 tokens. A tile and a value head have one record, written by the preparation and
read by the scan:

    qd [C, K] | kd [C, K] | kr - kd [C, K] | P [C, C] | T [C, C] | P's low part [C, C] | T's low part [C, C] |
    decay [K] | n [C] | q_scale [C]

(the matrices in bfloat16, the vectors in float32; for float32 inputs all in float32, without low parts, and with kr in
place of kr - kd). Where few sequences run, each is also cut into parts of several tiles whose states are linked exactly
(`compose`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch

from ...problem import Sizes
from ...segments import Segments

ALIGNMENT = 256  # bytes
CHUNK = 16  # tokens of a tile; states can be exported after any of them
STATE_TILES = 3  # what a chain of tiles takes besides, in tiles, where programs share chains; as in tiles.py
MAX_CARRIES = 512  # parts x value heads of a call that is cut into parts: bounds the scratch for their states
MAX_SHARES = 512  # programs that share chains, for each block of value rows: bounds the scratch for what they hand over
LEAST_VALUE_BLOCK = 32  # of a program
MAX_LINE = 1 << 31  # tiles of all chains together, where programs share them
MIN_PART_TILES = 4
MAX_GRID = 65535  # programs along the second and third axis of a grid
CUTS = (3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 20, 25, 33)  # numbers of parts of the longest segment that are considered
FIRST_EIGHTHS = (8, 12)  # lengths of first parts that are considered, in eighths of the others: those that paid


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def record_bytes(key_dim: int, precise: bool) -> int:
    """Size of one record, a multiple of ALIGNMENT."""
    matrices = CHUNK * (3 * key_dim + (2 if precise else 4) * CHUNK)
    return _align(matrices * (4 if precise else 2) + 4 * (key_dim + 2 * CHUNK))


def max_tiles(tokens: int, segments: int) -> int:
    """Most tiles that `segments` disjoint segments of `tokens` tokens can have."""
    return tokens // CHUNK + segments


def tile_table(segments: int, later: int, flags: int) -> int:
    """Where the table has its tiles, in units of 8 bytes (see tiles.py), with so many parts that are not first ones, or
    so many flags."""
    return -(-(3 * (segments + 1) + segments + 2 * later + flags) // 2)


def tile_grid(tiles: int, heads: int) -> tuple[int, int, int]:
    """A program for each head of each tile, the heads of a tile first; no division finds either. May exceed `tiles`.
    The first axis has no limit that matters, so what there may be most of goes there."""
    depth = -(-tiles // MAX_GRID)
    return heads, -(-tiles // depth), depth


@dataclass(frozen=True)
class Layout:
    """Byte offsets in the workspace. The tables come first, then records, then the states of parts."""

    tiles: int
    parts: int
    records: int
    carries: int  # [parts, HV, V, K] float32: a part's own contribution, then the state after it; or [shares, V, K]
    transitions: int  # [parts, HV, K, K] float32: what a part does to the state it starts from
    total: int

    @staticmethod
    def of(
        tiles: int,
        parts: int,
        shares: int,
        segments: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        record: int,
    ) -> Layout:
        """Of a call in so many parts, or with so many shares, or with neither."""
        flags = shares * (value_dim // LEAST_VALUE_BLOCK)
        tables = _align(8 * (tile_table(segments, max(parts - segments, 0), flags) + tiles))
        carries = tables + tiles * value_heads * record
        transitions = carries + (parts * value_heads + shares) * value_dim * key_dim * 4
        return Layout(
            tiles, parts, tables, carries, transitions, transitions + parts * value_heads * key_dim * key_dim * 4
        )


def workspace_bytes(sizes: Sizes) -> int:
    """Scratch of any prefill within `sizes`, however it is cut."""
    record = record_bytes(sizes.key_dim, sizes.dtype == torch.float32)
    tiles = max_tiles(sizes.tokens, sizes.segments)
    parts = max_parts(tiles, sizes.value_heads)
    shares = max_shares(sizes.segments, sizes.value_heads)
    rest = sizes.segments, sizes.value_heads, sizes.key_dim, sizes.value_dim, record
    return max(Layout.of(tiles, parts, 0, *rest).total, Layout.of(tiles, 0, shares, *rest).total)


def max_parts(tiles: int, value_heads: int) -> int:
    """Most parts that a call may be cut into; fewer than two never pays."""
    parts = min(MAX_CARRIES // value_heads, tiles // MIN_PART_TILES)
    return parts if parts > 1 else 0


def max_shares(segments: int, value_heads: int) -> int:
    """Most programs for each block of value rows that share the chains of a call."""
    return min(segments * value_heads, MAX_SHARES)


@dataclass(frozen=True)
class Cut:
    """How segments are cut into parts; `parts` 0 means not at all."""

    parts: int  # most parts of all segments together
    part_tiles: int
    later: int = 0  # of them, those that are not the first of a segment
    middle: int = 0  # of those, the ones that are not the last either
    first_eighths: int = 8  # length of a first part, in eighths of the others: its programs do not run a second time


NO_CUT = Cut(0, 1 << 30)


@dataclass(frozen=True)
class Costs:
    """Cost model of the scan, microseconds. Fitted on an H200."""

    together: tuple[float, ...]  # a tile of each where 1, 2, ... programs share a multiprocessor; more take turns
    transitions: tuple[float, ...]  # the same without outputs
    launch: float
    compose: float  # latency of one link of the chain of parts
    state: float = 0.0  # what a part and head's states and transition take, from and to memory
    piece: float = 0.0  # of a share: what it takes to begin with another chain; 0: programs do not share chains


# PORTABLE is a fit of the portable scan before its records changed and before first parts ran once, when `state` was
# part of the other costs; SM90 one of the Gluon scan as it is.
PORTABLE = Costs(together=(0.81, 1.27), transitions=(0.67, 1.05), launch=6.0, compose=4.2)
SM90 = Costs(
    together=(0.644, 1.009, 1.253),
    transitions=(0.544, 0.627, 1.178),
    launch=4.755,
    compose=2.759,
    state=0.121,
    piece=7.6,
)


def cut(
    segments: Segments, tokens: int, value_heads: int, blocks: tuple[int, int], units: int, costs: Costs = PORTABLE
) -> Cut:
    """Whether a call's segments run as parts side by side, and how long a part is.

    From the host's lengths where it has them, else from the maxima that the call is launched for. `blocks` are the
    programs a head needs for its value rows and for its key rows.
    """
    tiles = _tiles(segments, tokens)
    longest = int(tiles.max(initial=0))
    most = max_parts(max_tiles(tokens, segments.count), value_heads)
    if longest < 2 * MIN_PART_TILES or most < 2:
        return NO_CUT
    return cut_of(tuple(tiles.tolist()), value_heads, blocks, units, most, costs)


def shares(segments: Segments, tokens: int, value_heads: int, blocks: int, units: int, costs: Costs) -> int:
    """How many programs, for each of `blocks` blocks of value rows, share the chains of a call that is not cut. 0: each
    chain has a program of its own."""
    tiles = max_tiles(tokens, segments.count) + STATE_TILES * segments.count
    small = tiles * value_heads < MAX_LINE and max_tiles(tokens, 1) * MAX_SHARES < MAX_LINE
    if not costs.piece or segments.count * value_heads * blocks <= units or not small:
        return 0
    return shares_of(tuple(_tiles(segments, tokens).tolist()), value_heads, blocks, units, costs)


@functools.lru_cache(maxsize=512)
def shares_of(tiles: tuple[int, ...], value_heads: int, blocks: int, units: int, costs: Costs) -> int:
    """The cheapest number of shares for segments of `tiles` tiles each, by the cost model."""
    counts = np.asarray(tiles)
    best, best_cost = 0, 0.97 * predicted_whole(counts, value_heads, (blocks, 0), units, costs)
    for beside in range(1, len(costs.together) + 1):
        count = min(beside * units // blocks, max_shares(len(tiles), value_heads))
        cost = predicted_shared(counts, count, value_heads, blocks, units, costs)
        if cost < best_cost:
            best, best_cost = count, cost
    return best


def _tiles(segments: Segments, tokens: int) -> np.ndarray:
    """Tiles of each segment, as far as the host knows."""
    if segments.host is not None:
        return -(-segments.host[1] // CHUNK)
    return np.full(segments.count, -(-min(segments.max_length, tokens) // CHUNK))


@functools.lru_cache(maxsize=512)
def cut_of(
    tiles: tuple[int, ...], value_heads: int, blocks: tuple[int, int], units: int, most: int, costs: Costs
) -> Cut:
    """The cheapest cut of segments of `tiles` tiles each into at most `most` parts together, by the cost model."""
    counts = np.asarray(tiles)
    longest = int(counts.max())
    # Parts take scratch: not for less than the model can tell.
    best, best_cost = NO_CUT, 0.97 * predicted_whole(counts, value_heads, blocks, units, costs)
    for wanted in CUTS:
        part_tiles = -(-longest // wanted)
        parts = np.maximum(-(-counts // part_tiles), 1)
        if part_tiles < MIN_PART_TILES or parts.sum() > most or parts.max() < 2:
            continue
        for eighths in FIRST_EIGHTHS:
            cost = predicted(counts, parts, eighths, value_heads, blocks, units, costs)
            if cost < best_cost:
                count, middle = int(parts.sum()), int(np.maximum(parts - 2, 0).sum())
                best, best_cost = Cut(count, part_tiles, count - len(parts), middle, eighths), cost
    return best


def predicted_whole(tiles: np.ndarray, value_heads: int, blocks: tuple[int, int], units: int, costs: Costs) -> float:
    """Microseconds of the scan over segments that are not cut."""
    return _pass(tiles, np.full(len(tiles), value_heads * blocks[0]), units, costs.launch, costs.together)


def predicted_shared(tiles: np.ndarray, count: int, value_heads: int, blocks: int, units: int, costs: Costs) -> float:
    """Microseconds of the scan over segments whose chains are shared by `count` programs a block of value rows."""
    line = int((tiles + STATE_TILES).sum()) * value_heads
    share = max(-(-line // count), int(tiles.max()) + STATE_TILES)
    running = -(-line // share)
    pieces = 1 + len(tiles) * value_heads / running
    beside = -(-running * blocks // units)
    return costs.launch + share * costs.together[beside - 1] + pieces * costs.piece


def predicted(
    tiles: np.ndarray,
    parts: np.ndarray,
    first_eighths: int,
    value_heads: int,
    blocks: tuple[int, int],
    units: int,
    costs: Costs,
) -> float:
    """Microseconds of both passes and of what links them, over segments that are cut into `parts`."""
    ratio = first_eighths / 8
    lengths = tiles / (parts - 1 + ratio)
    first, later = value_heads * blocks[0], value_heads * blocks[0] * (parts - 1)
    middle = value_heads * sum(blocks) * np.maximum(parts - 2, 0)
    # A first part shares a multiprocessor as soon as any programs must (so it was measured), as long as a middle part
    # takes; its last tiles it has to itself.
    longest, most = float(lengths.max()), len(costs.together)
    rounds = float((lengths * (first + middle)).sum()) / longest / units
    n = min(math.ceil(rounds), most)
    beside = (costs.together[n - 1] + (n - 1) * costs.transitions[n - 1]) / n
    starting = beside + (ratio - 1) * costs.together[0]
    # Programs that find no place follow one by one as places fall free: the last turn is as long as it is full.
    turns, rest = divmod(rounds, most)
    last = float(np.interp(rest, range(most + 1), (0.0, *costs.transitions)))
    ahead = costs.launch + longest * max(starting, turns * costs.transitions[-1] + last)
    behind = _pass(lengths, later, units, costs.launch, costs.together)
    links = costs.compose * float(parts.max() - 2) + costs.state * float((parts - 1).sum()) * value_heads
    return ahead + behind + links


def _pass(lengths: np.ndarray, programs: np.ndarray, units: int, launch: float, together: tuple[float, ...]) -> float:
    """So many `programs` of each of `lengths`, in tiles. Those that outlast the others have the multiprocessors to
    themselves in the end, since the longest start first; where there are too many, they take turns."""
    order = np.argsort(lengths)
    tiles = np.diff(lengths[order], prepend=0)  # how long as many programs run as
    running = programs[order][::-1].cumsum()[::-1]
    turns, rest = np.divmod(running, len(together) * units)
    last = np.array((0.0, *together))[-(-rest // units)]
    return launch + float((tiles * (turns * together[-1] + last)).sum())
