"""Which rows a program works on: up to `block` of them, all of one expert."""

import triton
import triton.language as tl


@triton.jit
def rows_among_few(experts, mine, rows: tl.constexpr, padded: tl.constexpr, block: tl.constexpr):
    """The tile of program `mine`, one of as many as there are rows; `padded` is a power of two.

    The row that is the first of every `block` of its expert does the work of these.

    Returns:
      The expert, rows [block], which of them there are, and whether there is anything to do.
    """
    expert = tl.load(experts + mine)
    row = tl.arange(0, padded)
    same = tl.load(experts + row, mask=row < rows, other=-1) == expert
    before = tl.sum((same & (row < mine)).to(tl.int32), 0)
    rank = tl.cumsum(same.to(tl.int32), 0) - 1
    chosen = same[None, :] & (rank[None, :] == before + tl.arange(0, block)[:, None])
    which = tl.sum(tl.where(chosen, row[None, :], 0), 1)
    return expert, which, tl.sum(chosen.to(tl.int32), 1) > 0, before % block == 0


@triton.jit
def rows_in_order(order, starts, mine, count: tl.constexpr, padded: tl.constexpr, block: tl.constexpr):
    """The tile of program `mine`, one of `most_tiles`, out of `group_rows`; see `rows_among_few`."""
    index = tl.arange(0, padded)
    begin = tl.load(starts + index, mask=index < count, other=0)
    end = tl.load(starts + index + 1, mask=index < count, other=0)
    tiles = tl.cdiv(end - begin, block)
    expert = tl.sum((tl.cumsum(tiles, 0) <= mine).to(tl.int32), 0)
    works = expert < count
    expert = tl.where(works, expert, 0)
    before = tl.sum(tl.where(index < expert, tiles, 0), 0)
    at = tl.load(starts + expert) + (mine - before) * block + tl.arange(0, block)
    taken = at < tl.load(starts + expert + 1)
    return expert, tl.load(order + at, mask=taken, other=0), taken, works


@triton.jit
def program_rows(
    experts_or_order,
    starts,
    rows: tl.constexpr,
    count: tl.constexpr,
    grouped: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
):
    """The tile of this program along the grid's second axis, by either way."""
    mine = tl.program_id(1)
    if grouped:
        tile = rows_in_order(experts_or_order, starts, mine, count, padded, block)
    else:
        tile = rows_among_few(experts_or_order, mine, rows, padded, block)
    return tile
