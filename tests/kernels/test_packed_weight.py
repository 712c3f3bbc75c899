"""A packed weight is the float32 weight that it stands for, bit for bit, in products and in its columns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import packed_weights
import pytest
from hlo_text import instructions
from jaxspec_kernels.matmul import matmul
from op_base import OpTest

WIDTH, OUTPUTS = packed_weights.WIDTH, packed_weights.OUTPUTS
FORMS = packed_weights.FORMS
weight = packed_weights.weight
on_a_cpu = pytest.mark.skipif(matmul.why_not("numba") is not None, reason=f"{matmul.why_not('numba')}")


@pytest.mark.parametrize("form", FORMS)
def test_dequantizes_to_the_float32_weight(form):
    packed, values = weight(form)
    np.testing.assert_array_equal(packed.dense(), values, strict=True)
    np.testing.assert_array_equal(np.asarray(packed), values)


@pytest.mark.parametrize("form", FORMS)
def test_columns_of_it_are_columns_of_the_weight(form):
    packed, values = weight(form)
    ids = np.array([[3, 0, 529], [7, 7, 9999]])
    expected = np.moveaxis(values[:, np.minimum(ids, OUTPUTS - 1)], 0, -1)
    np.testing.assert_array_equal(packed.columns(ids), expected, strict=True)


@pytest.mark.parametrize("form", FORMS)
def test_columns_read_in_a_loop_dequantize_nothing_else(form):
    packed, _ = weight(form)

    def loop(packed, token):
        def body(_, carry):
            token, total = carry
            column = packed.columns(token)
            return jnp.argmax(column).astype(jnp.int32), total + column

        return jax.lax.fori_loop(0, 3, body, (token, jnp.zeros(WIDTH)))

    text = jax.jit(loop).lower(packed, jnp.int32(0)).compile().as_text()
    passed_on = ("parameter", "get-tuple-element")
    assert not [
        line
        for line, operation, size in instructions(text)
        if size >= WIDTH * 32 and operation not in passed_on
    ]


@pytest.mark.parametrize("form", FORMS)
def test_axes_split_anew_keep_the_order(form):
    packed, values = weight(form)
    split = packed.reshape(WIDTH, 5, 106)
    np.testing.assert_array_equal(split.dense(), values.reshape(WIDTH, 5, 106))
    assert split.reshape(-1, OUTPUTS).shape == (WIDTH, OUTPUTS)


@on_a_cpu
@pytest.mark.parametrize(
    ("form", "rows"), [(form, rows) for i, form in enumerate(FORMS) for rows in ((1, 8), (3, 19))[i % 2]]
)
def test_product_is_that_of_the_float32_weight_bit_for_bit(form, rows):
    packed, values = weight(form)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, WIDTH), np.float32))
    y = jax.jit(matmul)(x, packed)
    expected = [jax.jit(matmul)(row[None], jnp.asarray(values)) for row in x]
    np.testing.assert_array_equal(y, np.concatenate(expected), strict=True)


class Case(NamedTuple):
    """The name of a form."""

    name: str


class TestMatmulOfPackedWeight(OpTest):
    op = matmul
    cases = tuple(map(Case, FORMS))
    usual = ("Q4_1", "MXFP4")
    bound = 1e-6
    by_row = (0,)

    def arguments(self, case):
        x = np.random.default_rng(1).standard_normal((3, 1, WIDTH), np.float32)
        return jnp.asarray(x), weight(case.name)[0].reshape(WIDTH, 2, OUTPUTS // 2)

    def definition(self, case, x, packed):
        wide = np.asarray(x, np.float64) @ np.asarray(packed).astype(np.float64).reshape(WIDTH, OUTPUTS)
        return wide.reshape(*x.shape[:2], 2, OUTPUTS // 2)
