import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from jaxspec_kernels.random_words import random_words

OP = random_words
words_of = jax.jit(random_words, static_argnames=("pairs", "implementation"))


@pytest.mark.parametrize(("rows", "pairs"), [(1, 1), (3, 1), (0, 4), (5, 0), (4, 7), (2, 16), (3, 1001)])
def test_equals_jax(rows, pairs, implementation):
    rng = np.random.default_rng(0)
    keys, counters = rng.integers(2**32, size=(2, rows, 2), dtype=np.uint32)
    words = words_of(keys, counters, pairs=pairs, implementation=implementation)
    assert words.shape == (rows, pairs, 2)
    assert words.dtype == jnp.uint32
    for key, counter, row in zip(keys, counters, words, strict=True):
        first = counter[0] + np.arange(pairs, dtype=np.uint32)  # may wrap around
        expected = threefry_2x32(jnp.asarray(key), jnp.concatenate([first, np.full_like(first, counter[1])]))
        np.testing.assert_array_equal(row, expected.reshape(2, pairs).T)


def test_the_first_counter_wraps_around(implementation):
    keys = np.array([[1, 2]], np.uint32)
    last, first = (
        words_of(keys, np.array([[start, 5]], np.uint32), pairs=2, implementation=implementation)
        for start in (2**32 - 1, 0)
    )
    np.testing.assert_array_equal(last[0, 1], first[0, 0])
