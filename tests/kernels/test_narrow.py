import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxspec_kernels.attention_parts.coded_cache import decode, encode
from jaxspec_kernels.fp8_matmul.reference import split_fp8
from jaxspec_kernels.narrow import narrow

pytestmark = pytest.mark.gpu


def numbers():
    return np.random.default_rng(0).standard_normal((40, 128), np.float32)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn])
def test_what_one_program_rounds_and_widens_is_rounded(dtype):
    x = numbers()
    result = jax.jit(lambda x: narrow(x, dtype).astype(jnp.float32))(x)
    np.testing.assert_array_equal(result, x.astype(dtype).astype(np.float32))


def test_what_one_program_encodes_and_decodes_is_rounded():
    x = numbers()
    codes, exponents = map(np.asarray, jax.jit(encode)(x))
    expected = codes.astype(np.float32) * 2.0 ** (exponents[..., None].astype(np.float32) - 127)
    np.testing.assert_array_equal(jax.jit(lambda x: decode(*encode(x)))(x), expected)


def test_what_one_program_splits_and_adds_is_rounded():
    x = numbers()
    values, scale = map(np.asarray, jax.jit(lambda x: split_fp8(x, 1))(x))

    @jax.jit
    def together(x):
        values, scale = split_fp8(x, 1)
        return values.astype(jnp.float32) * scale

    np.testing.assert_array_equal(together(x), values.astype(np.float32) * scale)
