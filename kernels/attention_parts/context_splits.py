"""Parts of Triton attention kernels that split a slot's context over several programs."""

import triton
import triton.language as tl
from jaxspec_kernels.packed_matmul.codes_ptx import FP8

_FP8 = tl.constexpr(FP8)
_MAX_SPLITS = 32


def num_splits(tiles: int, context: int, block_keys: int, *, programs: int) -> int:
    """The number of splits of a context of at most `context` keys, for `tiles` tiles of rows.

    Args:
      block_keys: the least number of keys in a split.
      programs: the most to start, unless there are more tiles.
    """
    return max(1, min(programs // tiles, context // block_keys, _MAX_SPLITS))


@triton.jit
def split_bounds(
    row_first, row_last, limit: tl.constexpr, split, splits: tl.constexpr, block_keys: tl.constexpr
):
    """The first position and the end of one split of the range that a tile of rows sees."""
    sees = row_last >= row_first
    # Positions that no row of the tile sees are never read: they may hold another request's keys, or NaN.
    tile_first = tl.maximum(tl.min(tl.where(sees, row_first, 2147483647)), 0)
    tile_last = tl.minimum(tl.max(tl.where(sees, row_last, -1)), limit - 1)
    num_keys = tl.maximum(tile_last + 1 - tile_first, 0)
    length = tl.cdiv(tl.cdiv(num_keys, splits), block_keys) * block_keys
    begin = tile_first + split * length
    return begin, tl.minimum(begin + length, tile_last + 1)


@triton.jit
def absorb_scores(scores, peak, total):
    """A step of an online softmax in powers of two.

    Args:
      scores: [rows, keys].
      peak, total: the largest score and the sum of weights so far, [rows].

    Returns:
      The weights of the keys [rows, keys], the new `peak` and `total`, and the factor of earlier sums [rows].
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet has a peak of -inf, and -inf - -inf is NaN.
    safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - safe_peak[:, None])
    shrink = tl.exp2(peak - safe_peak)
    return weights, new_peak, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def load_scales(exponents, mask):
    """The scales f32 of rows of a `CodedCache`, by pointers to their exponents."""
    exponent = tl.load(exponents, mask=mask, other=0).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_pairs(words, mask):
    """The first and the second numbers of words of a `CodedCache`, bfloat16, without their scales.

    A code of NaN is read as 480. The row that stored it had logits of NaN itself.
    """
    loaded = tl.load(words, mask=mask, other=0)
    return tl.inline_asm_elementwise(
        _FP8, "=&r,=&r,r", [loaded], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
    )


@triton.jit
def merge_kernel(
    parts,
    peaks,
    totals,
    outputs,
    num_rows: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    splits: tl.constexpr,
    block_splits: tl.constexpr,
    block_dim: tl.constexpr,
):
    """Merges the splits' partial results of one row into its attention output.

    Args:
      parts: f32[slots, heads, splits, rows, head_dim], with rows = num_rows * group.
      peaks, totals: f32[slots, heads, splits, rows].
      outputs: [slots, num_rows, heads, group, head_dim].
    """
    slot = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    row = tl.program_id(1)
    rows: tl.constexpr = num_rows * group
    split = tl.arange(0, block_splits)
    dim = tl.arange(0, block_dim)
    part_row = (tl.program_id(0) * splits + split) * rows + row
    total = tl.load(totals + part_row, mask=split < splits, other=0.0)
    # Splits past the end of the context have not written their part.
    has_part = total > 0.0
    peak = tl.load(peaks + part_row, mask=has_part, other=float("-inf"))
    best = tl.max(peak, 0)
    weight = tl.where(has_part, tl.exp2(peak - tl.where(best == float("-inf"), 0.0, best)), 0.0)
    part = tl.load(
        parts + part_row[:, None] * head_dim + dim[None, :],
        mask=has_part[:, None] & (dim < head_dim)[None, :],
        other=0.0,
    )
    total = tl.sum(total * weight, 0)
    output = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    at = ((slot * num_rows + row // group) * heads + head) * group + row % group
    tl.store(outputs + at * head_dim + dim, output.to(outputs.dtype.element_ty), mask=dim < head_dim)
