"""Products of rows rounded to FP8: what is rounded how, and that kernels multiply exactly that."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bench.kernel_cases.packed_matmul import CASES, FP8, GATED, Case
from jaxspec_kernels.fp8_matmul import fp8_matmul, gated_fp8_matmul, reads
from jaxspec_kernels.fp8_matmul.reference import split_fp8
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


class TestTwoTerms(TestFp8Matmul):
    cases = tuple(case for case in FP8 if not case.group)
    usual = ("channels, odd sizes", "tensor")

    def options(self, case):
        return {"terms": 2}

    def definition(self, case, x, kernel):
        # Rows that are too small are rounded to zero.
        return np.where(np.abs(x).max(-1, keepdims=True) > 2.0**-100, x, 0).astype(np.float64) @ weights(
            case, *random(case)
        )


class TestGatedFp8Matmul(OpTest):
    op = gated_fp8_matmul
    cases = GATED
    usual = ("odd sizes",)
    # A number that bfloat16 puts beyond a code's edge gets the next code, which is up to 12 % away.
    bound = 3e-2
    by_row = (0,)

    @staticmethod
    def is_for(case, implementation):
        return implementation == "triton" or case.inner < 1024

    @staticmethod
    def weights(case):
        """Gate and up, and down, as `random` makes them."""
        sizes = (case.width, 2 * case.inner), (case.inner, case.width)
        return [Case("", case.rows, width, outputs, 8, 0) for width, outputs in sizes]

    def arguments(self, case):
        x = np.random.default_rng(1).standard_normal((case.rows, case.width))
        x[0, :128] = 0
        if case.rows > 2:
            x[1], x[2] = 0, x[2] * 2.0**-110
        shapes = (2, case.inner), (case.width,)
        packed = [
            pack_codes(*random(each), shape) for each, shape in zip(self.weights(case), shapes, strict=True)
        ]
        # Gates that are neither all 0 nor all linear.
        packed[0] = replace(packed[0], scale=(packed[0].scale.view(np.float32) / 4096).view(np.uint32))
        return jnp.asarray(x, case.dtype), *jax.tree.map(jnp.asarray, packed)

    def definition(self, case, x, gate_up, down):
        first, second = (weights(each, *random(each)) for each in self.weights(case))
        gate, up = np.split(rounded(x) @ (first / 4096), 2, axis=-1)
        with np.errstate(over="ignore"):
            return rounded(gate / (1 + np.exp(-gate)) * up) @ second


@pytest.mark.gpu
@pytest.mark.skipif(gated_fp8_matmul.why_not("triton") is not None, reason="needs a GPU and jax-triton")
@pytest.mark.parametrize("rows", [1, 5])
def test_gated_rows_are_rounded_between_the_products(rows):
    from jaxspec_kernels.fp8_matmul.triton_gated import gate_rows

    rng = np.random.default_rng(0)
    sums = (8 * rng.standard_normal((rows, 2, 640))).astype(ml_dtypes.bfloat16)
    sums[0, :, 130], sums[-1, 1, -1] = 0, 100
    factors, scale = rng.uniform(0.1, 0.2, rows), rng.uniform(0.5, 2, (2, 640))
    given = sums.reshape(rows, -1), factors.astype(np.float32), scale.astype(np.float32).reshape(-1)
    values, own = map(np.asarray, gate_rows(*map(jnp.asarray, given)))
    # The halves of a block are interleaved.
    codes = values.reshape(rows, 5, 64, 2).swapaxes(-1, -2).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    gate, up = (sums.astype(np.float64) * factors[:, None, None] * scale).swapaxes(0, 1)
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(own * 448, np.abs(expected).max(-1), rtol=1e-5)
    found = codes.reshape(rows, 640) * own[:, None]
    assert (np.abs(found - expected) <= np.maximum(2.0**-4 * np.abs(expected), 2.0**-10 * own[:, None])).all()


def test_two_terms_are_a_bfloat16():
    x = np.random.default_rng(0).standard_normal((4, 4096), np.float32).astype(ml_dtypes.bfloat16)
    x[1, 7] = 500
    values, scale = jax.jit(partial(split_fp8, terms=2))(x)
    assert (values.dtype, values.shape, scale.shape) == (jnp.float8_e4m3fn, (2, 4, 4096), (4, 1))
    wide, x = np.asarray(values, np.float64).sum(0) * np.asarray(scale, np.float64), x.astype(np.float64)
    largest = np.abs(x).max(-1, keepdims=True)
    is_large = np.abs(x) >= 2.0**-9 * largest
    np.testing.assert_array_equal(wide[is_large], x[is_large])
    assert (np.abs(wide - x) <= 2.0**-17 * largest).all()


def test_rows_are_rounded_by_their_largest_number():
    x = np.random.default_rng(0).standard_normal((3, 2, 256), np.float32)
    x[0, 1], x[1, 0], x[2, 0, 3], x[2, 1, 7] = 2.0**-121, 0, np.inf, np.nan
    (values,), scale = split_fp8(jnp.asarray(x), 1)
    assert (values.dtype, values.shape, scale.shape) == (jnp.float8_e4m3fn, x.shape, (3, 2, 1))
    wide = np.asarray(values, np.float64) * np.asarray(scale, np.float64)
    np.testing.assert_allclose(wide[:2], rounded(x[:2]), rtol=1e-6)
    assert np.isnan(wide[2]).all()
    assert not wide[0, 1].any()
    wide, x = wide[0, 0], x[0, 0]
    np.testing.assert_allclose(np.abs(wide).max(), np.abs(x).max(), rtol=1e-6)
    assert (np.abs(wide - x) <= 2.0**-4 * np.maximum(np.abs(x), 2.0**-10)).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_whole_blocks_in_fp8_are_read(case):
    if case.width > 1024:
        return
    kernel = pack_codes(*random(case), (case.outputs,))
    assert reads(kernel) == (case.bits == 8 and not case.is_int8 and case.name != "FP8, half a block")
