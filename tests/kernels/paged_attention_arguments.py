"""Arguments of `paged_attention` for a case, and the answer in float64."""

import jax.numpy as jnp
import numpy as np


def arguments(case, seed=0):
    """(queries, cache, page_table, first, last), with NaN in every position that no row may read."""
    rng = np.random.default_rng(seed)
    slots, rows, width, page = case.slots, case.rows, case.table_width, case.page_size
    end = case.context * (np.arange(slots) + 1) // slots
    if case.empty:
        end[1::3] = -1
    last = end[:, None] - np.arange(rows)[::-1]
    last = np.where(end[:, None] < 0, -1, last)  # rows before position 0 see nothing either
    first = np.maximum(last - (case.window - 1), 0) if case.window else np.zeros_like(last)
    table = 1 + rng.permutation(slots * width).reshape(slots, width)
    size = (1 + slots * width, case.kv_heads, 2, page, case.head_dim)
    cache = rng.standard_normal(size, np.float32)
    position = np.arange(width * page)
    sees = last >= first
    low = np.where(sees, first, np.iinfo(np.int32).max).min(axis=1)[:, None]
    unread = (position < low) | (position > last.max(axis=1)[:, None])
    slot, at = np.nonzero(unread)
    cache[table[slot, at // page], :, :, at % page] = np.nan
    cache[0] = np.nan
    dtype = jnp.dtype(case.dtype)
    queries = rng.standard_normal((slots, rows, case.kv_heads * case.group, case.head_dim), np.float32)
    ints = (jnp.asarray(x, jnp.int32) for x in (table, first, last))
    return jnp.asarray(queries, dtype), jnp.asarray(cache, dtype), *ints


def sink_logits(case):
    """The sinks of a case, or None."""
    if not case.sinks:
        return None
    sinks = 3 * np.random.default_rng(1).standard_normal(case.kv_heads * case.group)
    return jnp.asarray(sinks, jnp.dtype(case.dtype))


def attention_in_float64(queries, cache, page_table, first, last, *, scale, sinks=None):
    """The definition, slot by slot and row by row."""
    queries, cache, page_table, first, last = (
        np.asarray(x) for x in (queries, cache, page_table, first, last)
    )
    slots, rows, heads, _ = queries.shape
    kv_heads, page = cache.shape[1], cache.shape[3]
    result = np.zeros(queries.shape)
    for b, q in np.ndindex(slots, rows):
        begin, end = max(first[b, q], 0), last[b, q] + 1
        if begin >= end:
            continue
        position = np.arange(begin, end)
        tokens = cache[page_table[b, position // page], :, :, position % page].astype(np.float64)
        query = queries[b, q].astype(np.float64).reshape(kv_heads, heads // kv_heads, -1)
        scores = np.einsum("ngd,snd->ngs", query, tokens[:, :, 0]) * scale
        sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
        scores = np.concatenate([scores, sink.reshape(kv_heads, -1, 1)], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = (weights / weights.sum(axis=-1, keepdims=True))[..., :-1]
        result[b, q] = np.einsum("ngs,snd->ngd", weights, tokens[:, :, 1]).reshape(heads, -1)
    return result
