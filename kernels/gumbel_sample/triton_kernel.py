"""Gumbel sampling into a column in Triton: the best of each block of the vocabulary, then of the row."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jaxspec_kernels import collectives
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.random import Purpose
from triton.language.extra import libdevice

_BLOCK = 1024


def gumbel_sample(
    logits: jax.Array,
    temperature: jax.Array,
    seed: jax.Array,
    position: jax.Array,
    step: jax.Array,
    tokens: jax.Array,
    processed: jax.Array | None,
    *,
    purpose: Purpose,
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """See `reference.gumbel_sample`; draws the same tokens."""
    batch, vocabulary = logits.shape
    if not batch:
        return tokens, processed
    blocks = triton.cdiv(vocabulary, _BLOCK)
    step = jnp.asarray(step, jnp.int32)
    best = [jax.ShapeDtypeStruct((batch, blocks), jnp.int32)] * 2
    sizes: dict[str, Any] = {"vocabulary": vocabulary, "columns": tokens.shape[1], "block": _BLOCK}
    if processed is None:
        ranks, ids = triton_call(_greedy_kernel, (logits,), best, grid=(batch, blocks), **sizes)
    else:
        # If the vocabulary is not split, this pointer is never read.
        first = step if axis is None else lax.axis_index(axis) * vocabulary
        processed, ranks, ids = triton_call(
            _draw_kernel,
            (processed, logits, temperature, seed, position, step, first),
            best,
            in_place=1,
            grid=(batch, blocks),
            purpose=int(purpose),
            is_part=axis is not None,
            **sizes,
        )
    if axis is not None:
        parts = jnp.stack([ranks, ids + lax.axis_index(axis) * vocabulary])
        ranks, ids = collectives.all_gather(parts, axis, along=2)
        blocks = ranks.shape[1]
    (tokens,) = triton_call(
        _best_kernel,
        (tokens, ranks, ids, step),
        in_place=1,
        grid=(batch,),
        num_warps=1,
        blocks=blocks,
        columns=tokens.shape[1],
        block_blocks=triton.next_power_of_2(blocks),
    )
    return tokens, processed


@triton.jit
def _log1p(x):
    return libdevice.log1p(x)


@triton.jit
def _log(x):
    return libdevice.log(x)


@triton.jit
def _rank(x):
    """An int32 with the order that `argmax` uses: NaN above everything, and both zeros equal."""
    x = tl.where(x == 0.0, 0.0, x)
    word = x.to(tl.int32, bitcast=True)
    ordered = tl.where(word < 0, word ^ 0x7FFFFFFF, word)
    return tl.where(x != x, 0x7FFFFFFF, ordered)


@triton.jit
def _rotate(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def _four_rounds(x0, x1, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr, d: tl.constexpr):
    x0 = x0 + x1
    x1 = _rotate(x1, a) ^ x0
    x0 = x0 + x1
    x1 = _rotate(x1, b) ^ x0
    x0 = x0 + x1
    x1 = _rotate(x1, c) ^ x0
    x0 = x0 + x1
    x1 = _rotate(x1, d) ^ x0
    return x0, x1


@triton.jit
def _threefry2x32(k0, k1, x0, x1):
    """See `jaxspec_kernels.random_words.reference`."""
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = x0 + k0, x1 + k1
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = x0 + k1, x1 + k2 + 1
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0, x1 = x0 + k2, x1 + k0 + 2
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = x0 + k0, x1 + k1 + 3
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0, x1 = x0 + k1, x1 + k2 + 4
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    return x0 + k2, x1 + k0 + 5


@triton.jit
def _store_best(scores, index, vocabulary, ranks, ids):
    rank = tl.where(index < vocabulary, _rank(scores), -2147483648)
    best = tl.max(rank, 0)
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(ranks + at, best)
    tl.store(ids + at, tl.min(tl.where((rank == best) & (index < vocabulary), index, vocabulary - 1), 0))


@triton.jit
def _greedy_kernel(logits, ranks, ids, vocabulary: tl.constexpr, columns: tl.constexpr, block: tl.constexpr):
    index = tl.program_id(1) * block + tl.arange(0, block)
    scores = tl.load(logits + tl.program_id(0) * vocabulary + index, mask=index < vocabulary, other=0.0)
    _store_best(scores, index, vocabulary, ranks, ids)


@triton.jit
def _draw_kernel(
    processed,
    logits,
    temperature,
    seed,
    position,
    step,
    first,
    ranks,
    ids,
    purpose: tl.constexpr,
    is_part: tl.constexpr,
    vocabulary: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
):
    slot = tl.program_id(0)
    index = tl.program_id(1) * block + tl.arange(0, block)
    in_row = index < vocabulary
    heat = tl.load(temperature + slot)
    sampled = heat > 0
    row = tl.load(logits + slot * vocabulary + index, mask=in_row, other=0.0)
    # Triton's default division is not correctly rounded; the reference's is.
    row = tl.div_rn(row, tl.where(sampled, heat, 1.0))
    column = slot.to(tl.int64) * columns + tl.load(step)
    tl.store(processed + column * vocabulary + index, row, mask=in_row)
    scores = row
    if sampled:
        counter = tl.load(position + slot).to(tl.uint32)
        stream = tl.zeros_like(counter) + purpose
        k0, k1 = _threefry2x32(tl.load(seed + 2 * slot), tl.load(seed + 2 * slot + 1), counter, stream)
        pair = (tl.program_id(1) * (block // 2) + tl.arange(0, block // 2)).to(tl.uint32)
        if is_part:
            pair += tl.load(first).to(tl.uint32) // 2
        even, odd = _threefry2x32(k0, k1, pair, tl.zeros_like(pair))
        uniform = (tl.interleave(even, odd).to(tl.float32) + 0.5) * 2.3283064365386963e-10
        uniform = tl.minimum(uniform, 0.99999994039535522)
        scores = row - _log(-_log1p(-uniform))
    _store_best(scores, index, vocabulary, ranks, ids)


@triton.jit
def _best_kernel(
    tokens,
    ranks,
    ids,
    step,
    blocks: tl.constexpr,
    columns: tl.constexpr,
    block_blocks: tl.constexpr,
):
    slot = tl.program_id(0)
    part = tl.arange(0, block_blocks)
    rank = tl.load(ranks + slot * blocks + part, mask=part < blocks, other=-2147483648)
    index = tl.load(ids + slot * blocks + part, mask=part < blocks, other=2147483647)
    token = tl.min(tl.where(rank == tl.max(rank, 0), index, 2147483647), 0)
    tl.store(tokens + slot * columns + tl.load(step), token)
