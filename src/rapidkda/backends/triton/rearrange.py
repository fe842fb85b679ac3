"""Tensors joined, split and reordered for the kernels in Gluon. Where layouts fit, all of it is a choice of registers.

In operands of the matrix units a thread has columns in twos, 8 apart, of rows 8 apart. `in_order` (channels),
`at_columns` and `in_tiles` (values) map memory's order to theirs such that what a thread has are neighbours in memory.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def stack(items):
    """Tensors [K], a power of two of them, as the columns of one."""
    count: gl.constexpr = len(items)
    size: gl.constexpr = items[0].shape[0]
    for _ in gl.static_range(5):
        if len(items) > 1:
            joined = ()
            for i in gl.static_range(len(items) // 2):
                joined += (gl.join(items[i], items[len(items) // 2 + i]),)
            items = joined
    return gl.reshape(items[0], [size, count])


@gluon.jit
def columns(x):
    """The columns of x, a power of two of them."""
    size: gl.constexpr = x.shape[0]
    items = (x,)
    for _ in gl.static_range(5):
        if items[0].shape[1] > 1:
            apart = ()
            for i in gl.static_range(len(items)):
                apart += gl.split(gl.permute(gl.reshape(items[i], [size, 2, items[i].shape[1] // 2]), (0, 2, 1)))
            items = apart
    result = ()
    for i in gl.static_range(len(items)):
        result += (gl.reshape(items[i], [size]),)
    return result


@gluon.jit
def scalars(row_s, COUNT: gl.constexpr):
    """The elements of a row [COUNT] or [1, COUNT] in shared memory."""
    WARPS: gl.constexpr = gl.num_warps()
    if len(row_s.shape) == 1:
        row = gl.reshape(row_s.load(gl.BlockedLayout([COUNT], [32], [WARPS], [0])), [1, COUNT])
    else:
        row = row_s.load(gl.BlockedLayout([1, COUNT], [32, 1], [WARPS, 1], [1, 0]))
    items = columns(row)
    result = ()
    for i in gl.static_range(COUNT):
        result += (gl.sum(items[i], 0),)
    return result


@gluon.jit
def above(x, y):
    """x over y, both [R, C]."""
    return gl.reshape(gl.permute(gl.join(x, y), (2, 0, 1)), [2 * x.shape[0], x.shape[1]])


@gluon.jit
def twice(x):
    """x [R, C] beside itself."""
    return gl.reshape(gl.permute(gl.join(x, x), (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])


@gluon.jit
def halves(x):
    """The upper and the lower half of the rows of x."""
    return gl.split(gl.permute(gl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))


@gluon.jit
def sides(x):
    """The left and the right half of the columns of x."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def in_order(x, GROUPS: gl.constexpr):
    """Columns of x from memory's order, in which a thread has 4 GROUPS neighbours, to that of operands."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    apart = gl.reshape(x, [R, C // (16 * GROUPS), 4, GROUPS, 2, 2])
    return gl.reshape(gl.permute(apart, (0, 1, 3, 4, 2, 5)), [R, C])


@gluon.jit
def in_memory(x, GROUPS: gl.constexpr):
    """`in_order`, undone."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    apart = gl.reshape(x, [R, C // (16 * GROUPS), GROUPS, 2, 4, 2])
    return gl.reshape(gl.permute(apart, (0, 1, 4, 2, 3, 5)), [R, C])


@gluon.jit
def at_columns(x):
    """Values, columns of x [R, 128], from their order to that in which they are columns of operands.

    A warp has 32 neighbours, a thread four of them in the four tiles of a right operand, eight in those of a result.
    """
    R: gl.constexpr = x.shape[0]
    return gl.reshape(gl.permute(gl.reshape(x, [R, 4, 8, 4]), (0, 3, 1, 2)), [R, 128])


@gluon.jit
def as_values(x):
    """`at_columns`, undone."""
    R: gl.constexpr = x.shape[0]
    return gl.reshape(gl.permute(gl.reshape(x, [R, 4, 4, 8]), (0, 2, 3, 1)), [R, 128])


@gluon.jit
def in_tiles(x):
    """Values, rows of x [128, C], from their order to tiles of 16 rows, a value in the thread of its `at_columns`."""
    C: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [4, 8, 2, 2, C]), (2, 0, 3, 1, 4)), [128, C])


@gluon.jit
def out_of_tiles(x):
    """`in_tiles`, undone."""
    C: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [2, 4, 2, 8, C]), (1, 3, 0, 2, 4)), [128, C])
