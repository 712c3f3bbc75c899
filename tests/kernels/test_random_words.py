from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxspec_kernels.random_words import random_words
from op_base import OpTest


class Case(NamedTuple):
    name: str
    rows: int
    pairs: int


class TestRandomWords(OpTest):
    op = random_words
    cases = tuple(
        Case(f"{rows} x {pairs}", rows, pairs)
        for rows, pairs in ((1, 1), (3, 1), (5, 0), (4, 7), (2, 16), (3, 1001))
    )
    usual = ("4 x 7",)
    by_row = (0, 1)
    exact = ("xla", "numba")

    def arguments(self, case):
        keys, counters = np.random.default_rng(0).integers(2**32, size=(2, case.rows, 2), dtype=np.uint32)
        counters[-1, 0] = 2**32 - 1
        return jnp.asarray(keys), jnp.asarray(counters)

    def options(self, case):
        return {"pairs": case.pairs}

    def definition(self, case, keys, counters):
        """As JAX draws them; the first counter wraps around."""
        words = np.empty((case.rows, case.pairs, 2), np.uint32)
        for key, counter, row in zip(keys, counters, words, strict=True):
            first = counter[0] + np.arange(case.pairs, dtype=np.uint32)
            drawn = threefry_2x32(jnp.asarray(key), jnp.concatenate([first, np.full_like(first, counter[1])]))
            row[:] = drawn.reshape(2, case.pairs).T
        return words
