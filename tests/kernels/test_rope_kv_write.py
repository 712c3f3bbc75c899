from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.rope_kv_write import CASES
from jaxspec_kernels.rope_kv_write import rope_kv_write

OP = rope_kv_write


def arguments(case):
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    rows = (case.slots, case.rows)
    cache = np.full((case.pages, case.kv_heads, 2, case.page_size, case.head_dim), np.nan)
    owned = case.page_size + rng.permutation((case.pages - 1) * case.page_size)
    slots = owned[: case.slots * case.rows].reshape(rows)
    projected = rng.normal(size=(*rows, case.kv_heads, case.group + 2, case.head_dim))
    angles = rng.uniform(-9, 9, size=(*rows, case.head_dim // 2))
    return (
        jnp.asarray(cache, dtype),
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(projected, dtype),
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rotates_as_complex_numbers_and_writes_these_rows_only(case, implementation):
    cache, slots, projected, cos, sin = given = arguments(case)
    written, queries = jax.jit(lambda *args: OP(*args, implementation=implementation))(*given)
    wide = np.asarray(projected, np.float64)
    half = case.head_dim // 2
    turn = (np.asarray(cos) + 1j * np.asarray(sin))[:, :, None, None]
    turned = (wide[..., :half] + 1j * wide[..., half:]) * turn
    turned = np.concatenate([turned.real, turned.imag], axis=-1)
    bound = {"float32": 1e-6, "bfloat16": 2.0**-8}[case.dtype]
    assert queries.shape == (*slots.shape, case.kv_heads, case.group, case.head_dim)
    np.testing.assert_allclose(np.asarray(queries, np.float64), turned[..., :-2, :], rtol=bound, atol=bound)
    expected = np.array(cache, np.float64)
    for b, q in np.ndindex(slots.shape):
        page, offset = divmod(int(slots[b, q]), case.page_size)
        expected[page, :, 0, offset] = turned[b, q, :, -2]
        expected[page, :, 1, offset] = wide[b, q, :, -1]
    np.testing.assert_allclose(np.asarray(written, np.float64), expected, rtol=bound, atol=bound)
    np.testing.assert_array_equal(np.asarray(written[:, :, 1], np.float64), expected[:, :, 1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_cache_in_float16_holds_the_rounded_values(case, implementation):
    cache, *rest = arguments(replace(case, dtype="float32"))
    write = jax.jit(lambda *args: OP(*args, implementation=implementation))
    written, queries = write(cache.astype(jnp.float16), *rest)
    expected, same_queries = write(cache, *rest)
    assert written.dtype == jnp.float16
    np.testing.assert_array_equal(written, expected.astype(jnp.float16))
    np.testing.assert_array_equal(queries, same_queries)


def test_a_donated_cache_is_written_in_place(implementation):
    given = arguments(replace(CASES[-2], dtype="float32"))
    write = jax.jit(lambda *args: OP(*args, implementation=implementation), donate_argnums=0)
    memory = write.lower(*given).compile().memory_analysis()
    assert memory.alias_size_in_bytes == given[0].nbytes
    assert memory.temp_size_in_bytes < given[0].nbytes / 10
