"""The choice of entries in Triton: scores by tensor cores, then a search for the least score that is kept."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call

_FEW, _MANY, _BLOCK = 2048, 16384, 8192
"""Few or many scores of a row, which its program holds in registers; more are read again in every pass, in
blocks."""
_LOWEST: tl.constexpr = tl.constexpr(-2147483648)


def choose_entries(
    queries: jax.Array,
    weights: jax.Array,
    keys: jax.Array,
    entry_slots: jax.Array,
    num_entries: jax.Array,
    *,
    keep: int,
) -> jax.Array:
    """See `reference.choose_entries`.

    A program of the first kernel scores some entries for some rows of a slot. In the second, a program finds
    the entries of one row: it narrows an interval of scores until as many entries as are to be kept lie above
    it or in it. They are written in their own order.
    """
    batch, num_rows, heads, size = queries.shape
    width = entry_slots.shape[1]
    chosen = jax.ShapeDtypeStruct((batch, num_rows, keep), jnp.int32)
    if not queries.size or not keep:
        return jnp.zeros(chosen.shape, chosen.dtype)
    wide = queries.dtype == jnp.float32
    # Rows of a prompt read a tile of keys after each other. Larger tiles read the queries less often; smaller
    # ones fill the GPU.
    block_rows = min(triton.next_power_of_2(num_rows), 32)
    row_tiles = triton.cdiv(num_rows, block_rows)
    many = batch * row_tiles * triton.cdiv(width, 256) >= 256
    block_entries = 32 if wide else 256 if many else 64
    (scores,) = triton_call(
        _score_kernel,
        (queries, weights, keys, entry_slots, num_entries),
        [jax.ShapeDtypeStruct((batch, num_rows, width), jnp.float32)],
        grid=(triton.cdiv(width, block_entries), row_tiles, batch),
        num_warps=8 if many and not wide else 4,
        num_stages=2 if wide else 3,
        num_rows=num_rows,
        heads=heads,
        size=size,
        width=width,
        keep=keep,
        block_rows=block_rows,
        block_entries=block_entries,
        block_heads=16 if wide else min(max(triton.next_power_of_2(heads), 16), 64),
        block_dim=max(triton.next_power_of_2(size), 16),
    )
    block = triton.next_power_of_2(width)
    (result,) = triton_call(
        _keep_kernel,
        (scores, entry_slots, num_entries),
        [chosen],
        grid=(batch * num_rows,),
        num_warps=4 if block <= _FEW else 16,
        num_rows=num_rows,
        width=width,
        keep=keep,
        few=min(block, _FEW),
        many=min(block, _MANY),
        block=_BLOCK,
        block_keep=triton.next_power_of_2(keep),
    )
    return result


@triton.jit
def _score_kernel(
    queries,
    weights,
    keys,
    entry_slots,
    num_entries,
    scores,
    num_rows: tl.constexpr,
    heads: tl.constexpr,
    size: tl.constexpr,
    width: tl.constexpr,
    keep: tl.constexpr,
    block_rows: tl.constexpr,
    block_entries: tl.constexpr,
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
):
    start = tl.program_id(0) * block_entries
    first_row = tl.program_id(1) * block_rows
    slot = tl.program_id(2)
    row = first_row + tl.arange(0, block_rows)
    seen = tl.load(num_entries + slot * num_rows + row, mask=row < num_rows, other=0)
    # Rows that keep all of their entries need no scores. Keys that no row may see may be NaN.
    most = tl.max(tl.where(seen > keep, seen, 0), 0)
    if start < most:
        index = start + tl.arange(0, block_entries)
        used = index < most
        # 64 bits, because a cache may have more than 2^31 elements. A slot is the index of a cache's row.
        at = tl.load(entry_slots + slot * width + index, mask=used, other=0).to(tl.int64)
        dim = tl.arange(0, block_dim)[None, :]
        key = tl.load(keys + at[:, None] * size + dim, mask=used[:, None] & (dim < size), other=0.0)
        key = key.to(queries.dtype.element_ty)
        for i in range(first_row, tl.minimum(first_row + block_rows, num_rows)):
            flat = (slot * num_rows + i).to(tl.int64)
            score = tl.zeros((block_entries,), tl.float32)
            for first_head in tl.static_range(0, heads, block_heads):
                head = first_head + tl.arange(0, block_heads)
                at_head = flat * heads + head
                mask = (head < heads)[:, None] & (dim < size)
                query = tl.load(queries + at_head[:, None] * size + dim, mask=mask, other=0.0)
                weight = tl.load(weights + at_head, mask=head < heads, other=0.0).to(tl.float32)
                products = tl.dot(key, tl.trans(query), input_precision="ieee")
                score += tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
            tl.store(scores + flat * width + index, score, mask=used)


@triton.jit
def _ranks(scores, start, count, block: tl.constexpr):
    """Integers in the order of the scores: zeros are equal, NaN is above all, what is past the end below."""
    index = start + tl.arange(0, block)
    x = tl.load(scores + index, mask=index < count, other=0.0)
    word = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    rank = tl.where(word < 0, word ^ 0x7FFFFFFF, word)
    return tl.where(index < count, tl.where(x != x, 0x7F800001, rank), _LOWEST)


@triton.jit
def _keep(scores, slots, chosen, count, keep: tl.constexpr, block: tl.constexpr, is_whole: tl.constexpr):
    """Writes the slots of the `keep` best of `count` > `keep` entries, of which a whole block holds all."""
    held = _ranks(scores, 0, count, block)
    peaks, leasts = held, tl.where(held == _LOWEST, 0x7FFFFFFF, held)
    if not is_whole:
        for start in range(block, count, block):
            rank = _ranks(scores, start, count, block)
            peaks = tl.maximum(peaks, rank)
            leasts = tl.minimum(leasts, tl.where(rank == _LOWEST, 0x7FFFFFFF, rank))
    # `num_low` entries, at least `keep`, are at or above `low`, and fewer than `keep` at or above `high`.
    low, high = tl.min(leasts, 0).to(tl.int64), tl.max(peaks, 0).to(tl.int64) + 1
    num_low, num_high = count, count * 0
    while (num_low > keep) & (high - low > 1):
        # In 64 bits, as the difference of two ranks may not fit into 32.
        first = low + (high - low) // 4
        second = low + (high - low) // 2
        third = low + 3 * (high - low) // 4
        at_1, at_2, at_3 = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
        nums_1 = (held >= at_1).to(tl.int32)
        nums_2 = (held >= at_2).to(tl.int32)
        nums_3 = (held >= at_3).to(tl.int32)
        if not is_whole:
            for start in range(block, count, block):
                rank = _ranks(scores, start, count, block)
                nums_1 += (rank >= at_1).to(tl.int32)
                nums_2 += (rank >= at_2).to(tl.int32)
                nums_3 += (rank >= at_3).to(tl.int32)
        num_1, num_2, num_3 = tl.sum(nums_1, 0), tl.sum(nums_2, 0), tl.sum(nums_3, 0)
        if num_3 >= keep:
            low, num_low = third, num_3
        elif num_2 >= keep:
            low, num_low, high, num_high = second, num_2, third, num_3
        elif num_1 >= keep:
            low, num_low, high, num_high = first, num_1, second, num_2
        else:
            high, num_high = first, num_1
    # Those in the interval have equal scores, or all of them are kept.
    least = low.to(tl.int32)
    surely = (high - 1).to(tl.int32)
    wanted = keep - num_high
    above = num_high * 0
    within = num_high * 0
    for start in range(0, block if is_whole else count, block):
        rank = held if is_whole else _ranks(scores, start, count, block)
        is_above = (rank > surely).to(tl.int32)
        is_within = (rank >= least).to(tl.int32) - is_above
        # Two sums in one: a block has fewer than 2^15 entries.
        sums = tl.cumsum(is_above * 65536 + is_within, 0)
        of_above = above + sums // 65536
        of_within = within + sums % 65536
        takes = (is_above > 0) | ((is_within > 0) & (of_within <= wanted))
        index = start + tl.arange(0, block)
        slot = tl.load(slots + index, mask=takes, other=0)
        tl.store(chosen + of_above + tl.minimum(of_within, wanted) - 1, slot, mask=takes)
        above += tl.sum(is_above, 0)
        within += tl.sum(is_within, 0)


@triton.jit
def _keep_kernel(
    scores,
    entry_slots,
    num_entries,
    chosen,
    num_rows: tl.constexpr,
    width: tl.constexpr,
    keep: tl.constexpr,
    few: tl.constexpr,
    many: tl.constexpr,
    block: tl.constexpr,
    block_keep: tl.constexpr,
):
    # 64 bits: the scores of many rows may be more than 2^31 numbers.
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_entries + row)
    scores += row * width
    chosen += row * keep
    slots = entry_slots + row // num_rows * width
    if count <= keep:
        index = tl.arange(0, block_keep)
        slot = tl.load(slots + index, mask=index < keep, other=0)
        tl.store(chosen + index, slot, mask=index < keep)
    elif count <= few:
        _keep(scores, slots, chosen, count, keep, few, is_whole=True)
    elif width > few:
        if count <= many:
            _keep(scores, slots, chosen, count, keep, many, is_whole=True)
        elif width > many:
            _keep(scores, slots, chosen, count, keep, block, is_whole=False)
