"""Keys and values in 8 bits: how rows are rounded, and that every kernel writes and reads exactly that."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_cache_writes
import test_paged_attention
from bench import kernel_cases
from jaxspec_kernels.attention_parts.coded_cache import CodedCache, decode, encode
from jaxspec_kernels.paged_attention import paged_attention
from jaxspec_kernels.rope_kv_write import rope_kv_write
from paged_attention_arguments import arguments, attention_in_float64, sink_logits

OP = paged_attention
WRITES = {case.name: case for case in kernel_cases.rope_kv_write.CASES}
READS = {case.name: case for case in kernel_cases.paged_attention.CASES}


def rounded(rows):
    """Codes and exponents by the definition: the least power of two that leaves no number above 448."""
    rows = np.asarray(rows, np.float32)
    largest = np.where(np.isfinite(rows), np.abs(rows), 0).max(axis=-1, keepdims=True).astype(np.float64)
    with np.errstate(divide="ignore"):
        power = np.maximum(np.ceil(np.log2(largest / 448)), -126)
    codes = np.where(np.isfinite(rows), rows / 2.0**power, np.nan).astype(ml_dtypes.float8_e4m3fn)
    return codes, (power[..., 0] + 127).astype(np.uint8)


def numbers(*shape):
    """Rows of every magnitude, among them zeros, what is no number, and halves of the last bit."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, (*shape[:-1], 1))
    flat = rows.reshape(-1, shape[-1])
    flat[0], flat[1], flat[2] = 0, 448, 2.0**-140
    flat[3, 0], flat[4, 0], flat[5, 0] = np.nan, np.inf, 449
    flat[6] = np.resize([448, *(np.arange(16, 32) + 0.5), *(np.arange(17) / 1024)], shape[-1])
    flat[7] *= 2.0**95
    return rows.astype(np.float32)


def bits(codes):
    """Codes as bytes; all that are no number are alike."""
    codes = np.asarray(codes)
    return np.where(np.isnan(codes.astype(np.float32)), 0x7F, codes.view(np.uint8))


def test_a_row_is_rounded_with_the_least_power_of_two_that_holds_it():
    rows = numbers(200, 64)
    codes, exponents = jax.jit(encode)(rows)
    expected, powers = rounded(rows)
    np.testing.assert_array_equal(np.asarray(exponents), powers)
    np.testing.assert_array_equal(bits(codes), bits(expected))
    again = np.asarray(decode(codes, exponents), np.float64)
    good = np.abs(rows) > np.maximum(np.abs(rows).max(axis=-1, keepdims=True) / 2**13, 2.0**-120)
    assert (np.abs(again - rows)[good] <= np.abs(rows[good]) * 2.0**-4).all()
    np.testing.assert_array_equal(again, np.asarray(jnp.asarray(again, jnp.bfloat16), np.float64))


@pytest.mark.parametrize("name", ["odd sizes", "135M", "8B, batch 32"])
def test_a_step_writes_rounded_rows_and_touches_no_other(name, implementation):
    case, test = WRITES[name], test_cache_writes.TestRopeKvWrite()
    wide, slots, projected, cos, sin = test.arguments(case)
    special = numbers(*projected.shape[:-2], case.head_dim).astype(np.float32)
    projected = projected.at[..., -1, :].set(jnp.asarray(special, projected.dtype))
    cache = CodedCache(jnp.full(wide.shape, jnp.nan, jnp.float8_e4m3fn), jnp.full(wide.shape[:4], 77, "u1"))
    write = jax.jit(lambda *given: rope_kv_write(*given, implementation=implementation))
    written, queries = write(cache, slots, projected, cos, sin)
    kept, same = write(jnp.zeros(wide.shape, projected.dtype), slots, projected, cos, sin)
    np.testing.assert_array_equal(queries, same)
    codes, exponents = (np.full(x.shape, fill) for x, fill in ((cache.codes, 0x7F), (cache.exponents, 77)))
    for _, page, offset in test.places(case, np.asarray(slots)):
        expected, powers = rounded(np.asarray(kept, np.float32)[page, :, :, offset])
        codes[page, :, :, offset], exponents[page, :, :, offset] = bits(expected), powers
    np.testing.assert_array_equal(written.exponents, exponents)
    np.testing.assert_array_equal(bits(written.codes), codes)


@jax.jit
def coded(cache):
    """A cache in 8 bits, and the values that it holds."""
    codes, exponents = encode(cache)
    return CodedCache(codes, exponents), decode(codes, exponents)


@pytest.mark.parametrize(
    "name",
    [
        *("one", "first slot of a page", "odd sizes, empty slots", "window", "sinks, empty slots"),
        *("pages of one", "prefill, float32", "K = 15"),
    ],
)
def test_attention_reads_what_the_codes_stand_for(name, implementation):
    case = READS[name]
    queries, cache, *rest = arguments(case)
    scales = 2.0 ** np.random.default_rng(2).integers(-3, 3, (*cache.shape[:4], 1))
    held, values = coded(jnp.asarray(cache, jnp.float32) * scales)
    options = {"scale": case.head_dim**-0.5, "sinks": sink_logits(case)}
    given = (queries, held, *rest)
    result = jax.jit(lambda *x: paged_attention(*x, **options, implementation=implementation))(*given)
    expected = attention_in_float64(queries, values, *rest, **options)
    error = np.linalg.norm(np.asarray(result, np.float64) - expected)
    assert error <= test_paged_attention.BOUND[case.dtype] * max(np.linalg.norm(expected), 1e-30)
    if implementation == "numba":
        plain = paged_attention(queries, values, *rest, **options, implementation=implementation)
        np.testing.assert_array_equal(result, plain)
