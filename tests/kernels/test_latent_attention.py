"""Latent attention against its definition in float64: heads share the key, and its front is the value."""

import jax.numpy as jnp
import numpy as np
from bench.kernel_cases.latent_attention import CASES
from jaxspec_kernels.latent_attention import latent_attention
from op_base import OpTest

BOUND = {"float32": 2e-6, "bfloat16": 6e-3}


def arguments(case):
    """(queries, cache, page_table, first, last), with NaN in every position that no row may read."""
    rng = np.random.default_rng(0)
    slots, rows, width, page = case.slots, case.rows, case.table_width, case.page_size
    size = case.value_dim + case.rope_dim
    end = case.context * (np.arange(slots) + 1) // slots
    if case.empty:
        end[1::3] = -1
    last = np.where(end[:, None] < 0, -1, end[:, None] - np.arange(rows)[::-1])
    first = np.maximum(last - (case.window - 1), 0) if case.window else np.zeros_like(last)
    table = 1 + rng.permutation(slots * width).reshape(slots, width)
    cache = np.full((1 + slots * width, 1, 1, page, size), np.nan, np.float32)
    for b in range(slots):
        seen = last[b] >= first[b]
        if seen.any():
            position = np.arange(first[b][seen].min(), last[b].max() + 1)
            cache[table[b, position // page], 0, 0, position % page] = rng.normal(size=(len(position), size))
    queries = rng.standard_normal((slots, rows, case.heads, size), np.float32)
    dtype = jnp.dtype(case.dtype)
    ints = (jnp.asarray(x, jnp.int32) for x in (table, first, last))
    return jnp.asarray(queries, dtype), jnp.asarray(cache, dtype), *ints


def in_float64(queries, cache, page_table, first, last, *, value_dim, scale):
    """The definition, row by row."""
    queries, cache, page_table, first, last = (
        np.asarray(x) for x in (queries, cache, page_table, first, last)
    )
    page = cache.shape[3]
    result = np.zeros((*queries.shape[:3], value_dim))
    for b, q in np.ndindex(*first.shape):
        position = np.arange(max(first[b, q], 0), last[b, q] + 1)
        if not len(position):
            continue
        keys = cache[page_table[b, position // page], 0, 0, position % page].astype(np.float64)
        scores = queries[b, q].astype(np.float64) @ keys.T * scale
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result[b, q] = weights @ keys[:, :value_dim] / weights.sum(axis=-1, keepdims=True)
    return result


class TestLatentAttention(OpTest):
    """Nothing is read but what rows see."""

    op = latent_attention
    cases = CASES
    usual = ("odd sizes, empty slots",)
    bound = BOUND
    by_row = (0, 2, 3, 4)

    def arguments(self, case):
        return arguments(case)

    def options(self, case):
        return {"value_dim": case.value_dim, "scale": (case.value_dim + case.rope_dim) ** -0.5}

    def definition(self, case, *given):
        return in_float64(*given, **self.options(case))
