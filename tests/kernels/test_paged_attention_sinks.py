"""Attention sinks: one logit more in the softmax, without a value."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.paged_attention import CASES
from jaxspec_kernels.paged_attention import paged_attention
from paged_attention_arguments import arguments, attention_in_float64

SMALL = [case for case in CASES if case.context < 500 and case.slots < 8 and case.dtype == "float32"]


def sum_of_weights(queries, cache, page_table, first, last, *, scale):
    """Logarithm of the softmax's denominator per row and head, f64[B, Q, H]; -inf where nothing is seen."""
    queries, cache, page_table = (np.asarray(x, np.float64) for x in (queries, cache, page_table))
    first, last = np.asarray(first), np.asarray(last)
    heads, kv_heads, page = queries.shape[2], cache.shape[1], cache.shape[3]
    result = np.full(queries.shape[:3], -np.inf)
    for b, q in np.ndindex(*first.shape):
        position = np.arange(max(first[b, q], 0), last[b, q] + 1)
        if not len(position):
            continue
        keys = cache[page_table[b, position // page].astype(int), :, 0, position % page]
        query = queries[b, q].reshape(kv_heads, heads // kv_heads, -1)
        scores = np.einsum("ngd,snd->ngs", query, keys).reshape(heads, -1) * scale
        result[b, q] = np.logaddexp.reduce(scores, axis=-1)
    return result


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_sink_takes_its_share_and_brings_no_value(case):
    args, scale = arguments(case), case.head_dim**-0.5
    sinks = np.random.default_rng(1).normal(size=case.kv_heads * case.group) * 2
    denominator = sum_of_weights(*args, scale=scale)
    share = np.exp(denominator - np.logaddexp(denominator, sinks))
    expected = attention_in_float64(*args, scale=scale) * share[..., None]
    attend = jax.jit(partial(paged_attention, scale=scale, implementation="xla"))
    actual = attend(*args, sinks=jnp.asarray(sinks, jnp.float32))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
