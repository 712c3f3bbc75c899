"""Products of rows rounded to FP8: what is rounded how, and that kernels multiply exactly that."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bench.kernel_cases.packed_matmul import CASES, FP8
from jaxspec_kernels.fp8_matmul import fp8_matmul, reads
from jaxspec_kernels.fp8_matmul.reference import round_to_fp8
from jaxspec_kernels.packed_matmul import pack_codes
from op_base import OpTest
from test_packed_matmul import random, weights


def rounded(x):
    """Rows as they are multiplied, by the formula: float64."""
    rows = x.astype(np.float32)
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(448), largest, where=largest > 2.0**-100, out=np.zeros_like(largest))
    codes = (rows * inverse).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return codes * (largest / np.float32(448))


class TestFp8Matmul(OpTest):
    op = fp8_matmul
    cases = FP8
    usual = ("blocks, odd sizes", "channels, odd sizes")
    bound = 5e-3
    by_row = (0,)
    exact = ("triton",)

    @staticmethod
    def is_for(case, implementation):
        return implementation == "triton" or case.width * case.outputs <= 1 << 20

    def arguments(self, case):
        rng = np.random.default_rng(1)
        size = (case.rows, case.width)
        x = rng.standard_normal(size) * np.exp(rng.standard_normal(size))
        x[0, :128] = 0
        if case.rows > 2:
            x[1], x[2] = 0, x[2] * 2.0**-110
        kernel = pack_codes(*random(case), (case.outputs,))
        assert reads(kernel)
        return jnp.asarray(x, case.dtype), jax.tree.map(jnp.asarray, kernel)

    def definition(self, case, x, kernel):
        return rounded(x) @ weights(case, *random(case))


def test_rows_are_rounded_by_their_largest_number():
    x = np.random.default_rng(0).standard_normal((3, 2, 256), np.float32)
    x[1, 0], x[2, 1, 7] = 0, np.nan
    values, scale = round_to_fp8(jnp.asarray(x))
    assert (values.dtype, values.shape, scale.shape) == (jnp.float8_e4m3fn, x.shape, (3, 2, 1))
    wide = np.asarray(values, np.float64) * np.asarray(scale, np.float64)
    np.testing.assert_allclose(wide[:2], rounded(x[:2]), rtol=1e-6)
    assert np.isnan(wide[2, 1]).all()
    np.testing.assert_allclose(np.abs(wide[:2]).max(-1), np.abs(x[:2]).max(-1), rtol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_whole_blocks_in_fp8_are_read(case):
    if case.width > 1024:
        return
    kernel = pack_codes(*random(case), (case.outputs,))
    assert reads(kernel) == (case.bits == 8 and not case.is_int8 and case.name != "FP8, half a block")
