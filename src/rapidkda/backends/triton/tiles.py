"""The table of tiles and parts of a step, built on the device from the segment table in one small launch.

Each segment's program counts what lies before it and writes its own entries, so that no other kernel has to look for
its place. Layout of the table, int32: tile_begin [N + 1] | part_begin [N + 1] | order [N] | part_segment [parts] | a
gap to 8 bytes | tiles [tiles, 2], the first token of a tile and how many of its rows are real.
`order` names the segments from the longest to the shortest: programs that run longest start first.
Past the end a part's segment is -1 and a tile has no rows.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from . import launch
from .blocks import trips


@triton.jit
def tile_count(length, C: tl.constexpr):
    """Tiles of a segment; none for an empty one."""
    return (length + C - 1) // C


@triton.jit
def part_count(tiles, part_tiles):
    """Parts of a segment of `tiles` tiles; at least one, so that every state is passed on."""
    return tl.maximum((tiles + part_tiles - 1) // part_tiles, 1)


@triton.jit
def _fill(p_target, begin, end, value, BLOCK: tl.constexpr):
    """p_target[begin:end] = value."""
    for start in range(trips(begin), trips(end), BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(p_target + index, tl.zeros([BLOCK], tl.int32) + value, mask=index < end)


@triton.jit(
    do_not_specialize=["segments", "tiles", "parts", "part_tiles"], do_not_specialize_on_alignment=launch.TABLES
)
def tiles_kernel(
    p_table, p_first, p_length, segments, tiles, parts, part_tiles, first_s, length_s,
    C: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (N + 1): program n writes segment n's entries, the last one the ends."""
    if OVERLAP:
        gdc_launch_dependents()
    n = tl.program_id(0)
    tile = n * 0
    part = n * 0
    rank = n * 0
    own = tl.load(p_length + n.to(tl.int64) * length_s, mask=n < segments, other=0)
    for start in range(0, trips(segments), BLOCK):
        index = start + tl.arange(0, BLOCK)
        length = tl.load(p_length + index.to(tl.int64) * length_s, mask=index < segments, other=0)
        count = tile_count(length, C)
        before = index < n
        tile += tl.sum(tl.where(before, count, 0), 0)
        part += tl.sum(tl.where(before, part_count(count, part_tiles), 0), 0)
        ahead = (length > own) | ((length == own) & before)
        rank += tl.sum(((index < segments) & ahead).to(tl.int32), 0)
    tl.store(p_table + n, tile)
    tl.store(p_table + segments + 1 + n, part)
    p_order = p_table + 2 * (segments + 1)
    tl.store(p_order + rank, n, mask=n < segments)
    p_part_segment = p_order + segments
    p_tile = p_table + (2 * (segments + 1) + segments + parts + 1) // 2 * 2
    first = tl.load(p_first + n.to(tl.int64) * first_s, mask=n < segments, other=0)
    count = tile_count(own, C)
    is_end = n == segments
    part_end = tl.minimum(tl.where(is_end, parts, part + part_count(count, part_tiles)), parts)
    _fill(p_part_segment, part, part_end, tl.where(is_end, -1, n), BLOCK)
    tile_end = tl.minimum(tl.where(is_end, tiles, tile + count), tiles)
    for start in range(trips(tile), trips(tile_end), BLOCK):
        index = start + tl.arange(0, BLOCK)
        begin = (index - tile) * C
        rows = tl.where(is_end, 0, tl.minimum(own - begin, C))
        tl.store(p_tile + 2 * index, first + begin, mask=index < tile_end)
        tl.store(p_tile + 2 * index + 1, rows, mask=index < tile_end)
