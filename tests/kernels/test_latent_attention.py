"""Latent attention against its definition in float64: heads share the key, and its front is the value."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.latent_attention import CASES
from jaxspec_kernels.latent_attention import latent_attention
from jaxspec_kernels.op import UnavailableImplementationError

OP = latent_attention
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition_and_reads_nothing_else(case, implementation):
    given = arguments(case)
    options = {"value_dim": case.value_dim, "scale": (case.value_dim + case.rope_dim) ** -0.5}
    result = jax.jit(partial(OP, **options, implementation=implementation))(*given)
    expected = in_float64(*given, **options)
    assert result.dtype == given[0].dtype
    result = np.asarray(result, np.float64)
    assert np.isfinite(result).all()
    assert np.linalg.norm(result - expected) <= BOUND[case.dtype] * np.linalg.norm(expected)


@pytest.mark.skipif(OP.why_not("triton") is None, reason="the kernel runs here")
def test_a_kernel_asked_for_by_name_that_cannot_run_is_an_error_that_says_why():
    case = CASES[0]
    with pytest.raises(UnavailableImplementationError, match="latent_attention: implementation 'triton'"):
        OP(*arguments(case), value_dim=case.value_dim, scale=1.0, implementation="triton")
