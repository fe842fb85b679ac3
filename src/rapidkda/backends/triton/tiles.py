"""The table of tiles and parts of a step, built on the device from the segment table in one small launch.

Each segment's program counts what lies before it and writes its own entries, so that no other kernel has to look for
its place. Layout of the table, int32: tile_begin [N + 1] | part_begin [N + 1] | line [N + 1] | order [N] |
later [later parts, 2] or flags | a gap to 8 bytes | tiles [tiles, 2], the first token of a tile and how many of its
rows are real. `order` names the segments from the longest to the shortest: programs that run longest start first.
`line` is where they begin, in this order, if they lie one after another, each as long as its `weight`. `later` names
segment and index of all parts but the first ones: those that another part follows, then the last ones. The flags, by
which programs of the scan hand states over, are cleared.
Past the end a part's segment is -1 and a tile has no rows.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from . import launch
from .blocks import trips, within

# Reading and writing the state of a chain of tiles takes about as long as so many tiles. As in plan.py.
STATE_TILES = tl.constexpr(3)


@triton.jit
def tile_count(length, C: tl.constexpr):
    """Tiles of a segment; none for an empty one."""
    return (length + C - 1) // C


@triton.jit
def weight(tiles):
    """What a segment of `tiles` tiles counts where programs share the work, in tiles."""
    return tiles + STATE_TILES


@triton.jit
def part_count(tiles, part_tiles):
    """Parts of a segment of `tiles` tiles; at least one, so that every state is passed on."""
    return tl.maximum((tiles + part_tiles - 1) // part_tiles, 1)


@triton.jit
def part_start(tiles, index, parts, first_eighths):
    """First tile of a part; where parts end, of the part past the last. The first part is `first_eighths` eighths as
    long as the others."""
    eighths = tl.where(index > 0, first_eighths + 8 * (index - 1), 0).to(tl.int64)
    return (tiles * eighths // (first_eighths + 8 * (parts - 1))).to(tl.int32)


@triton.jit
def _name(p_later, begin, end, n, index, BLOCK: tl.constexpr):
    """later[begin:end] = (n, index), (n, index + 1), ..."""
    for start in range(trips(begin), trips(end), BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(p_later + 2 * at, tl.zeros([BLOCK], tl.int32) + n, mask=at < end)
        tl.store(p_later + 2 * at + 1, at - begin + index, mask=at < end)


@triton.jit(
    do_not_specialize=["tokens", "segments", "tiles", "later", "flags", "part_tiles"],
    do_not_specialize_on_alignment=launch.TABLES,
)
def tiles_kernel(
    p_table, p_first, p_length, tokens, segments, tiles, later, flags, part_tiles, first_s, length_s,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N + 1): program n writes segment n's entries, the last one the ends."""
    n = tl.program_id(0)
    tile = n * 0
    part = n * 0
    rank = n * 0
    line = n * 0
    middle = n * 0
    middles = n * 0
    last = n * 0
    first = tl.load(p_first + n.to(tl.int64) * first_s, mask=n < segments, other=0)
    own = tl.load(p_length + n.to(tl.int64) * length_s, mask=n < segments, other=0)
    first, own = within(first, own, tokens)
    for start in range(0, trips(segments), BLOCK):
        index = start + tl.arange(0, BLOCK)
        start_of = tl.load(p_first + index.to(tl.int64) * first_s, mask=index < segments, other=0)
        length = tl.load(p_length + index.to(tl.int64) * length_s, mask=index < segments, other=0)
        start_of, length = within(start_of, length, tokens)
        count = tile_count(length, C)
        before = index < n
        tile += tl.sum(tl.where(before, count, 0), 0)
        parts = tl.where(index < segments, part_count(count, part_tiles), 0)
        between = tl.maximum(parts - 2, 0)
        part += tl.sum(tl.where(before, parts, 0), 0)
        middle += tl.sum(tl.where(before, between, 0), 0)
        middles += tl.sum(between, 0)
        last += tl.sum((before & (parts > 1)).to(tl.int32), 0)
        ahead = (length > own) | ((length == own) & before)
        ahead = (index < segments) & (ahead | (n == segments))
        rank += tl.sum(ahead.to(tl.int32), 0)
        line += tl.sum(tl.where(ahead, weight(count), 0), 0)
    tl.store(p_table + n, tile)
    tl.store(p_table + segments + 1 + n, part)
    p_line = p_table + 2 * (segments + 1)
    tl.store(p_line + rank, line)
    p_order = p_line + segments + 1
    tl.store(p_order + rank, n, mask=n < segments)
    p_later = p_order + segments
    p_tile = p_table + (3 * (segments + 1) + segments + 2 * later + flags + 1) // 2 * 2
    count = tile_count(own, C)
    is_end = n == segments
    parts = part_count(count, part_tiles)
    last += middles
    if is_end:
        _name(p_later, last, later, -1, 0, BLOCK)
        for start in range(0, trips(flags), BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(p_later + 2 * later + at, tl.zeros([BLOCK], tl.int32), mask=at < flags)
    else:
        _name(p_later, middle, tl.minimum(middle + parts - 2, later), n, 1, BLOCK)
        _name(p_later, last, tl.minimum(last + tl.minimum(parts - 1, 1), later), n, parts - 1, BLOCK)
    tile_end = tl.minimum(tl.where(is_end, tiles, tile + count), tiles)
    for start in range(trips(tile), trips(tile_end), BLOCK):
        index = start + tl.arange(0, BLOCK)
        begin = (index - tile) * C
        rows = tl.where(is_end, 0, tl.minimum(own - begin, C))
        tl.store(p_tile + 2 * index, first + begin, mask=index < tile_end)
        tl.store(p_tile + 2 * index + 1, rows, mask=index < tile_end)
