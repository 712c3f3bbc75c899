"""The choice of entries, against its definition in float64."""

import jax.numpy as jnp
import numpy as np
from bench.kernel_cases.choose_entries import CASES
from jaxspec_kernels.choose_entries import choose_entries
from op_base import OpTest


def arguments(case):
    rng = np.random.default_rng(0)
    slots, rows, per_page = case.slots, case.rows, case.per_page
    counts = rng.integers(0, case.entries + 1, (slots, rows))
    counts[-1, -1] = case.entries
    if case.empty:
        counts[1::3] = 0
    lists = rng.permuted(np.arange(slots * case.entries)).reshape(slots, -1)
    keys = np.full((1 + slots * case.entries // per_page, 1, 1, per_page, case.head_dim), np.nan)

    def draw(*size):
        return rng.integers(-1, 2, size) if case.ties else rng.normal(size=size)

    for b in range(slots):
        seen = lists[b, : counts[b].max()]
        keys[seen // per_page, 0, 0, seen % per_page] = draw(len(seen), case.head_dim)
    queries = jnp.asarray(draw(slots, rows, case.heads, case.head_dim), case.dtype)
    weights = jnp.asarray(draw(slots, rows, case.heads), jnp.float32)
    lists, counts = jnp.asarray(lists, jnp.int32), jnp.asarray(counts, jnp.int32)
    return queries, weights, jnp.asarray(keys, case.dtype), lists, counts


class TestChooseEntries(OpTest):
    """Only what a row may see is chosen, in any order; behind that, anything of its slot."""

    op = choose_entries
    cases = CASES
    usual = ("odd, empty slots",)
    by_row = (0, 1, 3, 4)

    def arguments(self, case):
        return arguments(case)

    def options(self, case):
        return {"keep": case.keep}

    def definition(self, case, queries, weights, keys, lists, counts):
        chosen = np.zeros((*queries.shape[:2], case.keep), np.int32)
        per_page = keys.shape[3]
        for b, q in np.ndindex(*queries.shape[:2]):
            read = keys[lists[b] // per_page, 0, 0, lists[b] % per_page].astype(np.float64)
            by_head = np.maximum(queries[b, q].astype(np.float64) @ read.T, 0)
            scores = weights[b, q].astype(np.float64) @ by_head
            scores[counts[b, q] :] = -np.inf
            chosen[b, q] = lists[b, np.argsort(-scores, kind="stable")[: case.keep]]
        return chosen

    def check(self, case, results, expected):
        (chosen,) = results
        assert chosen.shape == expected.shape
        assert chosen.min(initial=0) >= 0
        counts = np.asarray(arguments(case)[4])
        if chosen.shape[0] != len(counts):
            return super().check(case, results, expected)
        seen = np.arange(case.keep) < counts[..., None]
        mine, theirs = (np.sort(np.where(seen, x, -1), axis=-1) for x in (chosen, expected))
        np.testing.assert_array_equal(mine, theirs)
        return None
