"""Packed attention in Triton, which reads only the keys that a tile of rows sees."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.attention_parts.context_splits import absorb_scores
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.packed_attention.reference import packed_attention as reference

# Heads of more elements do not fit a multiprocessor's registers.
MAX_HEAD_DIM = 256


def packed_attention(
    queries: jax.Array, keys: jax.Array, values: jax.Array, first: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `reference.packed_attention`, which computes heads that do not fit."""
    if not fits(queries, values):
        return reference(queries, keys, values, first, scale=scale)
    batch, length, heads, group, head_dim = queries.shape
    wide = queries.dtype == jnp.float32
    block_rows, block_keys = (32, 32) if wide or head_dim > 128 else (64, 64)
    attended, log_total = triton_call(
        _kernel,
        (queries, keys, values, first),
        [
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct(queries.shape[:-1], jnp.float32),
        ],
        grid=(triton.cdiv(length, block_rows), batch * heads * group),
        num_warps=4,
        num_stages=2 if wide else 3,
        length=length,
        heads=heads,
        group=group,
        head_dim=head_dim,
        # In powers of two, which the GPU computes faster.
        scale=scale * math.log2(math.e),
        block_rows=block_rows,
        block_keys=block_keys,
        block_dim=max(triton.next_power_of_2(head_dim), 16),
    )
    return attended, log_total


def fits(queries: jax.Array, values: jax.Array) -> bool:
    """Whether the kernels can compute heads of these sizes."""
    return queries.size > 0 and values.shape[-1] == queries.shape[-1] <= MAX_HEAD_DIM


@triton.jit
def _kernel(
    queries,
    keys,
    values,
    first,
    attended,
    log_totals,
    length: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    scale: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
):
    begin = tl.program_id(0) * block_rows
    sequence = tl.program_id(1) // (heads * group)
    query_head = tl.program_id(1) % (heads * group)
    row = begin + tl.arange(0, block_rows)
    in_rows = row < length
    # Rows past the end see nothing.
    row_first = tl.load(first + sequence * length + row, mask=in_rows, other=length)
    at = head_rows(sequence * length + row, query_head, heads * group)
    query = load_rows(queries, at, in_rows, head_dim, block_dim)

    peak = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    output = tl.zeros((block_rows, block_dim), tl.float32)
    all_see_from = tl.max(row_first)
    for start in range(tl.min(row_first) // block_keys * block_keys, begin + block_rows, block_keys):
        key_row = start + tl.arange(0, block_keys)
        key_at = head_rows(sequence * length + key_row, query_head // group, heads)
        key = load_rows(keys, key_at, key_row < length, head_dim, block_dim)
        value = load_rows(values, key_at, key_row < length, head_dim, block_dim)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if (start < all_see_from) | (start + block_keys > begin):
            visible = (key_row[None, :] >= row_first[:, None]) & (key_row[None, :] <= row[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        weights, peak, total, shrink = absorb_scores(scores, peak, total)
        output = tl.dot(weights.to(query.dtype), value, output * shrink[:, None], input_precision="ieee")

    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    store_rows(attended, at, in_rows, output, head_dim, block_dim)
    tl.store(log_totals + at, (peak + tl.log2(total)) * 0.6931471805599453, mask=in_rows)


@triton.jit
def head_rows(row, head, heads: tl.constexpr):
    """Where a head of rows is, in heads. 64 bits: an array may have more than 2^31 elements."""
    return row.to(tl.int64) * heads + head


@triton.jit
def load_rows(array, at, exists, head_dim: tl.constexpr, block_dim: tl.constexpr):
    """Heads of rows, zero past their end and where they do not exist."""
    dim = tl.arange(0, block_dim)
    mask = exists[:, None] & (dim < head_dim)[None, :]
    return tl.load(array + at[:, None] * head_dim + dim[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(array, at, exists, rows, head_dim: tl.constexpr, block_dim: tl.constexpr):
    """Writes what `load_rows` reads."""
    dim = tl.arange(0, block_dim)
    mask = exists[:, None] & (dim < head_dim)[None, :]
    tl.store(array + at[:, None] * head_dim + dim[None, :], rows.to(array.dtype.element_ty), mask=mask)
