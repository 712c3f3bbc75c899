import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.kv_write import CASES
from jaxspec_kernels.kv_write import kv_write

OP = kv_write


def arguments(case):
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    cache = np.full((case.pages, case.kv_heads, 2, case.page_size, case.head_dim), np.nan)
    rows = (case.slots, case.rows, case.kv_heads, case.head_dim)
    owned = case.page_size + rng.permutation((case.pages - 1) * case.page_size)
    slots = owned[: case.slots * case.rows].reshape(case.slots, case.rows)
    keys, values = (jnp.asarray(rng.normal(size=rows), dtype) for _ in range(2))
    return jnp.asarray(cache, dtype), jnp.asarray(slots, jnp.int32), keys, values


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_writes_these_rows_and_nothing_else(case, implementation):
    cache, slots, keys, values = arguments(case)
    expected = np.array(cache)
    for b, q in np.ndindex(slots.shape):
        page, offset = divmod(int(np.asarray(slots)[b, q]), case.page_size)
        expected[page, :, 0, offset] = np.asarray(keys)[b, q]
        expected[page, :, 1, offset] = np.asarray(values)[b, q]
    written = jax.jit(partial(OP, implementation=implementation))(cache, slots, keys, values)
    assert written.dtype == cache.dtype
    np.testing.assert_array_equal(np.asarray(written, np.float32), expected.astype(np.float32))


def test_rows_without_a_page_share_page_0_and_touch_no_other(implementation):
    cache, slots, keys, values = arguments(CASES[2])
    write = jax.jit(partial(OP, implementation=implementation))
    written = np.asarray(write(cache, jnp.zeros_like(slots), keys, values))
    assert np.isnan(written[1:]).all()
    assert np.isfinite(written[0, :, :, 0]).all()


def test_rows_are_cast_to_the_cache(implementation):
    cache, slots, keys, values = arguments(CASES[2])
    written = OP(cache.astype(jnp.bfloat16), slots, keys, values, implementation=implementation)
    assert written.dtype == jnp.bfloat16


def test_a_donated_cache_is_written_in_place(implementation):
    def loop(cache, slots, keys, values):
        def write(i, cache):
            return OP(cache, slots + i, keys, values, implementation=implementation)

        return jax.lax.fori_loop(0, 3, write, cache)

    cache, slots, keys, values = arguments(CASES[-2])
    compiled = jax.jit(loop, donate_argnums=0).lower(cache, slots - 3, keys, values).compile()
    shape = re.escape("f32[" + ",".join(map(str, cache.shape)))
    assert re.search(rf"= {shape}", compiled.as_text())
    assert not re.search(rf"= {shape}\S* (copy|transpose)\(", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes / 10
