"""Attention over listed slots and compressed entries, against its definition in float64."""

import jax.numpy as jnp
import numpy as np
from bench.kernel_cases.indexed_attention import CASES
from jaxspec_kernels.indexed_attention import indexed_attention
from op_base import OpTest

BOUND = {"float32": 2e-6, "bfloat16": 6e-3}


def arguments(case):
    """The operation's arrays, with NaN wherever no row may read, and index 0 past every row's window."""
    rng = np.random.default_rng(0)
    slots, width, page = case.slots, case.table_width, case.page_size
    end = case.context * (np.arange(slots) + 1) // slots
    if case.empty:
        end[1::3] = -1
    last = np.where(end[:, None] < 0, -1, end[:, None] - np.arange(case.rows)[::-1])
    last = np.maximum(last, -1)
    table = 1 + rng.permutation(slots * width).reshape(slots, width)
    first = np.maximum(last - (case.window - 1), 0)
    lengths = np.where(last < 0, 0, last + 1 - first)
    index = np.arange(case.window)
    position = np.minimum(first[..., None] + index, width * page - 1)
    listed = table[np.arange(slots)[:, None, None], position // page] * page + position % page
    listed = np.where(index < lengths[..., None], listed, 0)
    counts = np.where(last < 0, 0, (last + 1) // case.ratio)

    def cache(per_page, used):
        """An array of pages, finite at the (slot, index) pairs that rows read."""
        size = (1 + slots * width, case.kv_heads, 2, per_page, case.head_dim)
        array = np.full(size, np.nan)
        for b, at in used:
            array[table[b, at // per_page], :, :, at % per_page] = rng.normal(size=size[1:3] + size[4:])
        return jnp.asarray(array, case.dtype)

    read = {(b, p) for b, q in np.ndindex(last.shape) for p in range(first[b, q], last[b, q] + 1)}
    window = cache(page, sorted(read))
    entries = None
    if case.ratio > 1:
        used = [(b, j) for b in range(slots) for j in range(counts[b].max())]
        entries = cache(page // case.ratio, used)
    heads = case.kv_heads * case.group
    queries = jnp.asarray(rng.normal(size=(slots, case.rows, heads, case.head_dim)), case.dtype)
    listed, lengths, table, counts = (jnp.asarray(x, jnp.int32) for x in (listed, lengths, table, counts))
    return queries, window, listed, lengths, entries, table, counts


def in_float64(queries, window, listed, lengths, entries, table, counts, *, scale):
    """The definition, row by row."""
    queries, window, table = (np.asarray(x, np.float64) for x in (queries, window, table))
    listed, lengths, counts = (np.asarray(x) for x in (listed, lengths, counts))
    kv_heads, page = window.shape[1], window.shape[3]
    result = np.zeros(queries.shape)
    for b, q in np.ndindex(*queries.shape[:2]):
        seen = [window[s // page, :, :, s % page] for s in listed[b, q, : lengths[b, q]]]
        if entries is not None:
            per_page = entries.shape[3]
            index = np.arange(counts[b, q])
            pages = table[b, index // per_page].astype(int)
            seen += list(np.asarray(entries, np.float64)[pages, :, :, index % per_page])
        if not seen:
            continue
        keys, values = np.moveaxis(np.stack(seen), 2, 0)  # [S, N, D] each
        scores = np.einsum("ngd,snd->ngs", queries[b, q].reshape(kv_heads, -1, queries.shape[-1]), keys)
        weights = np.exp(scale * (scores - scores.max(axis=-1, keepdims=True)))
        weights /= weights.sum(axis=-1, keepdims=True)
        result[b, q] = np.einsum("ngs,snd->ngd", weights, values).reshape(queries.shape[2:])
    return result


class TestIndexedAttention(OpTest):
    """Nothing is read but what rows see."""

    op = indexed_attention
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
