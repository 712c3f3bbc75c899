"""The gradients of packed attention in Triton. Scores are computed again, once for each of two kernels."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.packed_attention.reference import packed_attention_gradients as reference
from jaxspec_kernels.packed_attention.triton_kernel import fits, head_rows, load_rows, store_rows


def packed_attention_gradients(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    log_total: jax.Array,
    gradient: jax.Array,
    mean: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `reference.packed_attention_gradients`, which computes heads that do not fit."""
    given = (queries, keys, values, first, log_total, gradient, mean)
    if not fits(queries, values):
        return reference(*given, scale=scale)
    batch, length, heads, group, head_dim = queries.shape
    wide = queries.dtype == jnp.float32
    narrow = wide or head_dim > 128
    sizes = {
        "length": length,
        "heads": heads,
        "group": group,
        "head_dim": head_dim,
        "scale": scale,
        # In powers of two, which the GPU computes faster.
        "binary_scale": scale * math.log2(math.e),
        "block_dim": max(triton.next_power_of_2(head_dim), 16),
    }
    block_rows, block_keys = (32, 32) if narrow else (64, 64 if head_dim <= 64 else 32)
    (to_queries,) = triton_call(
        _query_kernel,
        given,
        [jax.ShapeDtypeStruct(queries.shape, queries.dtype)],
        grid=(triton.cdiv(length, block_rows), batch * heads * group),
        num_stages=2 if narrow else 3,
        block_rows=block_rows,
        block_keys=block_keys,
        **sizes,
    )
    block_rows, block_keys = (32, 32) if narrow else (64, 64)
    ends = _ends(first, block_keys)
    to_keys, to_values = triton_call(
        _key_kernel,
        (*given, ends),
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)],
        grid=(ends.shape[1], batch * heads),
        num_stages=3 if head_dim <= 64 and not narrow else 2,
        block_rows=block_rows,
        block_keys=block_keys,
        **sizes,
    )
    return to_queries, to_keys, to_values


def _ends(first: jax.Array, size: int) -> jax.Array:
    """i32[B, tiles]: the end of the rows that see any of `size` keys."""
    length = first.shape[1]
    last = jnp.minimum(jnp.arange(0, length, size) + size, length) - 1
    return jax.vmap(lambda x: jnp.searchsorted(x, last, side="right"))(first).astype(jnp.int32)


@triton.jit
def _query_kernel(
    queries,
    keys,
    values,
    first,
    log_totals,
    gradients,
    means,
    to_queries,
    length: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    scale: tl.constexpr,
    binary_scale: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
):
    begin = tl.program_id(0) * block_rows
    sequence = tl.program_id(1) // (heads * group)
    query_head = tl.program_id(1) % (heads * group)
    row = begin + tl.arange(0, block_rows)
    in_rows = row < length
    row_first = tl.load(first + sequence * length + row, mask=in_rows, other=length)
    at = head_rows(sequence * length + row, query_head, heads * group)
    query = load_rows(queries, at, in_rows, head_dim, block_dim)
    gradient = load_rows(gradients, at, in_rows, head_dim, block_dim)
    log_total = tl.load(log_totals + at, mask=in_rows, other=0.0) * 1.4426950408889634
    mean = tl.load(means + at, mask=in_rows, other=0.0)

    output = tl.zeros((block_rows, block_dim), tl.float32)
    for start in range(tl.min(row_first) // block_keys * block_keys, begin + block_rows, block_keys):
        key_row = start + tl.arange(0, block_keys)
        key_at = head_rows(sequence * length + key_row, query_head // group, heads)
        key = load_rows(keys, key_at, key_row < length, head_dim, block_dim)
        value = load_rows(values, key_at, key_row < length, head_dim, block_dim)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * binary_scale
        visible = (key_row[None, :] >= row_first[:, None]) & (key_row[None, :] <= row[:, None])
        weights = tl.exp2(tl.where(visible, scores - log_total[:, None], float("-inf")))
        rise = tl.dot(gradient, tl.trans(value), input_precision="ieee") - mean[:, None]
        output = tl.dot((weights * rise).to(key.dtype), key, output, input_precision="ieee")

    store_rows(to_queries, at, in_rows, output * scale, head_dim, block_dim)


@triton.jit
def _key_kernel(
    queries,
    keys,
    values,
    first,
    log_totals,
    gradients,
    means,
    ends,
    to_keys,
    to_values,
    length: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    scale: tl.constexpr,
    binary_scale: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
):
    begin = tl.program_id(0) * block_keys
    sequence = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    key_row = begin + tl.arange(0, block_keys)
    in_keys = key_row < length
    key_at = head_rows(sequence * length + key_row, head, heads)
    key = load_rows(keys, key_at, in_keys, head_dim, block_dim)
    value = load_rows(values, key_at, in_keys, head_dim, block_dim)
    end = tl.load(ends + sequence * tl.num_programs(0) + tl.program_id(0))

    key_sum = tl.zeros((block_keys, block_dim), tl.float32)
    value_sum = tl.zeros((block_keys, block_dim), tl.float32)
    # Scores are transposed, [keys, rows], so that the weights are the left operand of both sums.
    for member in range(group):
        for start in range(begin // block_rows * block_rows, end, block_rows):
            row = start + tl.arange(0, block_rows)
            in_rows = row < length
            row_first = tl.load(first + sequence * length + row, mask=in_rows, other=length)
            at = head_rows(sequence * length + row, head * group + member, heads * group)
            query = load_rows(queries, at, in_rows, head_dim, block_dim)
            gradient = load_rows(gradients, at, in_rows, head_dim, block_dim)
            log_total = tl.load(log_totals + at, mask=in_rows, other=0.0) * 1.4426950408889634
            mean = tl.load(means + at, mask=in_rows, other=0.0)
            scores = tl.dot(key, tl.trans(query), input_precision="ieee") * binary_scale
            visible = (key_row[:, None] >= row_first[None, :]) & (key_row[:, None] <= row[None, :])
            weights = tl.exp2(tl.where(visible, scores - log_total[None, :], float("-inf")))
            value_sum = tl.dot(weights.to(key.dtype), gradient, value_sum, input_precision="ieee")
            rise = tl.dot(value, tl.trans(gradient), input_precision="ieee") - mean[None, :]
            key_sum = tl.dot((weights * rise).to(key.dtype), query, key_sum, input_precision="ieee")

    store_rows(to_keys, key_at, in_keys, key_sum * scale, head_dim, block_dim)
    store_rows(to_values, key_at, in_keys, value_sum, head_dim, block_dim)
