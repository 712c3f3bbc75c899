"""Attention over listed slots, against its definition in float64."""

import jax.numpy as jnp
import numpy as np
from bench.kernel_cases.sparse_attention import CASES
from jaxspec_kernels.sparse_attention import sparse_attention
from op_base import OpTest

BOUND = {"float32": 2e-6, "bfloat16": 6e-3}


def lengths(rng, case, most):
    counts = rng.integers(0, most + 1, (case.slots, case.rows))
    counts[-1, -1] = most
    if case.empty:
        counts[1::3] = 0
    return counts


def filled(rng, case, lists, counts, per_page):
    """An array of pages with numbers in the slots that rows see, and NaN in all others."""
    pages = 2 + lists.max(initial=0) // per_page
    array = np.full((pages, 1, 1, per_page, case.head_dim), np.nan)
    for b, q in np.ndindex(*counts.shape):
        for slot in lists[b, min(q, lists.shape[1] - 1), : counts[b, q]]:
            array[slot // per_page, 0, 0, slot % per_page] = rng.normal(size=case.head_dim)
    return jnp.asarray(array, case.dtype)


def arguments(case):
    rng = np.random.default_rng(0)
    slots, rows = case.slots, case.rows
    counts, seen = lengths(rng, case, case.window), lengths(rng, case, case.entries)
    # No slot is listed by two slots, as NaN of one would show in the other.
    window = rng.permuted(np.arange(slots * rows * case.window)).reshape(slots, rows, -1)
    lists = rng.permuted(np.arange(slots * rows * case.entries)).reshape(slots, rows, case.entries)
    lists = lists[:, :1] if case.shared else lists
    queries = jnp.asarray(rng.normal(size=(slots, rows, case.heads, case.head_dim)), case.dtype)
    caches = filled(rng, case, window, counts, case.page_size), filled(rng, case, lists, seen, case.per_page)
    ints = (jnp.asarray(x, jnp.int32) for x in (window, counts, lists, seen))
    window, counts, lists, seen = ints
    sinks = jnp.asarray(rng.normal(size=case.heads), jnp.float32)
    return queries, caches[0], window, counts, caches[1] if case.entries else None, lists, seen, sinks


def in_float64(queries, cache, window, counts, entries, lists, seen, sinks, *, scale):
    """The definition, row by row."""
    result = np.zeros(queries.shape)
    for b, q in np.ndindex(*queries.shape[:2]):
        chosen = [cache[s // cache.shape[3], 0, 0, s % cache.shape[3]] for s in window[b, q, : counts[b, q]]]
        for s in lists[b, min(q, lists.shape[1] - 1), : seen[b, q]]:
            chosen.append(entries[s // entries.shape[3], 0, 0, s % entries.shape[3]])
        if not chosen:
            continue
        vectors = np.stack(chosen).astype(np.float64)
        scores = scale * queries[b, q].astype(np.float64) @ vectors.T
        weights = np.exp(scores)
        total = weights.sum(axis=-1) + np.exp(sinks.astype(np.float64))
        result[b, q] = weights @ vectors / total[:, None]
    return result


class TestSparseAttention(OpTest):
    """Nothing is read but what rows see."""

    op = sparse_attention
    cases = CASES
    usual = ("odd, empty slots",)
    bound = BOUND
    by_row = (0, 2, 3, 5, 6)

    def arguments(self, case):
        return arguments(case)

    def options(self, case):
        return {"scale": case.head_dim**-0.5}

    def definition(self, case, *given):
        return in_float64(*given, **self.options(case))
