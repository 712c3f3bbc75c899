"""What products with weights in codes multiply, by the number of rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxspec_kernels.matmul import matmul
from jaxspec_kernels.op import recorded
from jaxspec_kernels.packed_matmul import HOPPER_ROWS, pack_codes
from jaxspec_kernels.packed_matmul import coded_product as module
from jaxspec_kernels.packed_matmul.coded_product import (
    FEW_FP8_ROWS,
    FEW_ROWS,
    SPLIT_ROWS,
    coded_product,
    gated_coded_product,
    is_gated_in_fp8,
)


def weight(bits, activations=None, groups=2):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16 if bits == 4 else 120, (64, 256), np.uint8)
    codes = codes if bits == 4 else codes.view(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 0.02, (64, groups)).astype(np.float32)
    packed = jax.tree.map(jnp.asarray, pack_codes(codes, scale, None, (2, 32)))
    return replace(packed, activations=activations)


def rows(number, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(1).standard_normal((number, 256)), dtype)


def operations(x, kernel, product=coded_product):
    with recorded() as results:
        jax.eval_shape(lambda *given: product(*given), x, kernel)  # traced anew
    return [name for name, _ in results]


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_have_the_bits_of_a_network_without_codes(bits):
    kernel, x = weight(bits), rows(FEW_ROWS + 1)
    dense = jnp.asarray(np.asarray(kernel).astype(ml_dtypes.bfloat16))
    expected = jax.jit(matmul)(x, dense)
    np.testing.assert_array_equal(jax.jit(coded_product)(x, kernel), expected)
    assert operations(x, kernel) == ["dequantize_codes", "matmul"]
    assert operations(x[:-1], kernel) == ["packed_matmul"]
    assert operations(x.astype(jnp.float32), kernel) == ["packed_matmul"]


def test_gates_and_ups_are_multiplied_as_other_rows_are():
    kernel, x = weight(4), rows(FEW_ROWS + 1)
    gate, up = np.moveaxis(np.einsum("ri,ioj->roj", *(np.asarray(a, np.float64) for a in (x, kernel))), 1, 0)
    exact = gate / (1 + np.exp(-gate)) * up
    for number, expected in (
        (FEW_ROWS, ["gated_packed_matmul"]),
        (FEW_ROWS + 1, ["dequantize_codes", "matmul"]),
    ):
        assert operations(x[:number], kernel, gated_coded_product) == expected
        result = np.asarray(jax.jit(gated_coded_product)(x[:number], kernel), np.float64)
        assert np.linalg.norm(result - exact[:number]) < 8e-3 * np.linalg.norm(exact[:number])


@pytest.mark.parametrize(("bits", "name"), [(8, "fp8_matmul"), (4, "matmul")])
def test_rows_are_rounded_only_if_they_are_many_and_codes_are_fp8(bits, name):
    few = FEW_FP8_ROWS if bits == 8 else FEW_ROWS
    kernel, x = weight(bits, "float8_e4m3fn"), rows(few + 1)
    assert operations(x, kernel)[-1] == name
    assert operations(x[:-1], kernel) == ["packed_matmul"]


def test_rows_are_split_for_weights_with_a_scale_by_output(monkeypatch):
    kernel = weight(8, groups=1)
    assert operations(rows(FEW_ROWS + 1), kernel) == ["dequantize_codes", "matmul"]
    monkeypatch.setattr(module, "runs_here", lambda: True)
    assert operations(rows(FEW_FP8_ROWS), kernel) == ["packed_matmul"]
    x = rows(FEW_FP8_ROWS + 1)
    assert operations(x, kernel) == operations(rows(SPLIT_ROWS), kernel) == ["fp8_matmul"]
    assert operations(rows(SPLIT_ROWS + 1), kernel) == ["dequantize_codes", "matmul"]
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).reshape(256, 64)
    result = np.asarray(jax.jit(coded_product)(x, kernel), np.float64).reshape(exact.shape)
    assert np.linalg.norm(result - exact) < 3e-3 * np.linalg.norm(exact)  # one rounding to bfloat16
    assert operations(rows(FEW_ROWS + 1), weight(8)) == ["dequantize_codes", "matmul"]


def test_a_kernel_for_many_rows_multiplies_more_of_them_with_the_codes(monkeypatch):
    monkeypatch.setattr(module, "is_for_hopper", lambda kernel: kernel.bits == 4)
    assert operations(rows(HOPPER_ROWS), weight(4)) == ["packed_matmul"]
    assert operations(rows(HOPPER_ROWS + 1), weight(4)) == ["dequantize_codes", "matmul"]
    assert operations(rows(FEW_ROWS + 1), weight(8)) == ["dequantize_codes", "matmul"]


def test_exact_mode_multiplies_all_numbers_of_rows_with_the_codes(monkeypatch):
    monkeypatch.setattr(module, "is_exact", lambda: True)
    assert operations(rows(999), weight(8, "float8_e4m3fn")) == ["packed_matmul"]


def test_only_two_weights_with_a_scale_by_output_are_gated_in_fp8(monkeypatch):
    def is_gated(number, *weights, dtype=jnp.bfloat16):
        return is_gated_in_fp8(rows(number, dtype), *weights)

    rounded, dense = weight(8, "float8_e4m3fn", groups=1), jnp.zeros((256, 64), jnp.bfloat16)
    many = FEW_FP8_ROWS + 1
    assert is_gated(many, rounded, rounded)
    assert not is_gated(FEW_FP8_ROWS, rounded, rounded)
    assert not is_gated(many, rounded, rounded, dtype=jnp.float32)
    for other in (
        dense,
        weight(8, groups=1),
        weight(8, "float8_e4m3fn"),
        weight(4, "float8_e4m3fn", groups=1),
    ):
        assert not is_gated(many, rounded, other)
        assert not is_gated(many, other, rounded)
    monkeypatch.setattr(module, "is_exact", lambda: True)
    assert not is_gated(many, rounded, rounded)
