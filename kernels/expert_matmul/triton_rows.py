"""Finds the rows of a program's tile: up to `block` rows of one expert.

There are two ways. Few rows are not sorted: there is a program for every row, and of every `block` rows of an
expert, the program of the first one computes them all. More rows are grouped with `group_rows`, and there are
`max_tiles` programs.
"""

import triton
import triton.language as tl


@triton.jit
def program_tile(
    experts_or_order,
    starts,
    rows: tl.constexpr,
    count: tl.constexpr,
    grouped: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """The tile of this program, which is its index along the grid's second axis.

    Args:
      experts_or_order, starts: the result of `group_rows` if `grouped`; otherwise twice the rows' experts.
      padded: a power of two, at least `count` if `grouped`, otherwise at least `rows`.

    Returns:
      The tile's expert, the rank of its first row among the expert's rows, and whether the program has work.
    """
    mine = tl.program_id(1)
    index = tl.arange(0, padded)
    if grouped:
        begin = tl.load(starts + index, mask=index < count, other=0)
        end = tl.load(starts + index + 1, mask=index < count, other=0)
        tiles = tl.cdiv(end - begin, block)
        expert = tl.sum((tl.cumsum(tiles, 0) <= mine).to(tl.int32), 0)
        works = expert < count
        first = (mine - tl.sum(tl.where(index < expert, tiles, 0), 0)) * block
    else:
        expert = tl.load(experts_or_order + mine)
        before = tl.load(experts_or_order + index, mask=index < mine, other=-1) == expert
        first = tl.sum(before.to(tl.int32), 0)
        works = first % block == 0
    return expert, first, works


@triton.jit
def tile_rows(
    experts_or_order,
    starts,
    expert,
    first,
    rows: tl.constexpr,
    grouped: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """The indices of a tile's rows, [block], and a mask of those that exist."""
    rank = first + tl.arange(0, block)
    if grouped:
        at = tl.load(starts + expert) + rank
        taken = at < tl.load(starts + expert + 1)
        row = tl.load(experts_or_order + at, mask=taken, other=0)
    else:
        index = tl.arange(0, padded)
        same = tl.load(experts_or_order + index, mask=index < rows, other=-1) == expert
        ranks = tl.cumsum(same.to(tl.int32), 0) - 1
        chosen = same[None, :] & (ranks[None, :] == rank[:, None])
        row = tl.sum(tl.where(chosen, index[None, :], 0), 1)
        taken = tl.sum(chosen.to(tl.int32), 1) > 0
    return row, taken
