"""Products with weights in codes: what codes stand for, and what the kernel's PTX makes of them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bench.kernel_cases.packed_matmul import CASES, GATED_CODES, Case
from bench.random_codes import random_codes
from jaxspec_kernels.packed_matmul import (
    CodedWeight,
    codes_ptx,
    dequantize_codes,
    gated_packed_matmul,
    hopper_tiles,
    pack_codes,
    packed_matmul,
)
from jaxspec_kernels.packed_matmul.hopper_tiles import MANY_ROWS, PROGRAMS, is_for_hopper, split_tiles
from op_base import OpTest
from ptx import run_ptx

OP = packed_matmul
OFFSETS = Case("INT4, offsets", 19, 384, 96, 4, 32)
"""As of GGUF's Q4_1 and Q4_K."""
INT8_OFFSETS = Case("INT8, offsets", 19, 320, 96, 8, 32, is_int8=True)
"""As of GGUF's Q5_K."""
WITH_OFFSETS = (OFFSETS, INT8_OFFSETS, replace(INT8_OFFSETS, name="INT8, offsets of 16", group=16))


def random(case, *, zero=True):
    """Codes, scales and zero points of a case, as `pack_codes` takes them."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256 if case.bits == 8 else 16, (case.outputs, case.width), np.uint8)
    if case.is_int8:
        codes = codes.view(np.int8)
    elif case.bits == 8:
        codes[codes & 127 == 127] = 1  # NaN
        codes = codes.view(ml_dtypes.float8_e4m3fn)
    shape = case.outputs // case.scale_rows, case.width // (case.group or case.width)
    scale = rng.uniform(0.5, 2, shape).astype(np.float16).astype(np.float32)
    return codes, scale, rng.integers(0, 17, shape, np.uint8) if case.has_zero and zero else None


def weights(case, codes, scale, zero):
    """The weights [width, outputs] by their definition, in float64."""

    def each(factors):
        return factors.repeat(case.scale_rows, 0).repeat(case.group or case.width, 1)

    wide = codes.astype(np.float64)
    if case.bits == 4:
        wide = wide - (8 if zero is None else each(zero))
    return (wide * each(scale)).T


def with_offsets(case):
    """A weight of codes that stand for themselves, and the weights [width, outputs] by their definition."""
    codes, scale, _ = random(case)
    offset = np.random.default_rng(3).standard_normal(scale.shape, np.float32)
    zero = None if case.is_int8 else np.zeros(scale.shape, np.uint8)
    weight = pack_codes(codes, scale, zero, (case.outputs,), offset=offset)
    wide = (codes * scale.repeat(case.group, 1)).astype(np.float64) + offset.repeat(case.group, 1)
    return weight, wide.astype(np.float32).T


def packed(case):
    return with_offsets(case)[0] if case in WITH_OFFSETS else pack_codes(*random(case), (case.outputs,))


@pytest.mark.parametrize("case", WITH_OFFSETS, ids=lambda case: case.name)
def test_offsets_are_added_to_scaled_codes(case):
    weight, expected = with_offsets(case)
    np.testing.assert_array_equal(np.asarray(jax.tree.map(jnp.asarray, weight)), expected)
    codes, scale, _ = random(replace(case, group=128, width=512))
    zero = None if case.is_int8 else np.zeros(scale.shape, np.uint8)
    assert pack_codes(codes, scale, zero, (case.outputs,), offset=scale) is None  # no kernel reads it


class TestPackedMatmul(OpTest):
    op = packed_matmul
    cases = (*CASES, *WITH_OFFSETS)
    usual = (
        "FP8, blocks, odd sizes",
        "INT4, 128, zero points, odd sizes",
        "INT4, offsets",
        "INT8, offsets of 16",
    )
    bound = 5e-3
    by_row = (0,)
    exact = ("triton",)

    @staticmethod
    def is_for(case, implementation):
        return implementation == "triton" or case.width * case.outputs <= 1 << 20

    def arguments(self, case):
        rng = np.random.default_rng(1)
        x = jnp.asarray(rng.standard_normal((case.rows, case.width), np.float32), case.dtype)
        return x, jax.tree.map(jnp.asarray, packed(case))

    def definition(self, case, x, kernel):
        return np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)


class TestGatedPackedMatmul(OpTest):
    op = gated_packed_matmul
    cases = GATED_CODES
    usual = ("INT4, 5 rows", "FP8, blocks, 150 rows")
    bound = 8e-3  # of gates and ups, which some implementations round
    by_row = (0,)

    @staticmethod
    def is_for(case, implementation):
        return implementation == "triton" or case.width * case.outputs <= 1 << 20

    def arguments(self, case):
        x = np.random.default_rng(1).standard_normal((case.rows, case.width), np.float32)
        packed = pack_codes(*random(case), (2, case.outputs // 2))
        # Gates that are neither all 0 nor all linear. Zero points stay, as only exponents change.
        scale = packed.scale.view(np.float32) / self.divisor(case)
        packed = replace(packed, scale=scale.view(np.uint32))
        return jnp.asarray(x, case.dtype), jax.tree.map(jnp.asarray, packed)

    @staticmethod
    def divisor(case):
        return 4096 if case.bits == 8 and not case.is_int8 else 2048 if case.is_int8 else 128

    def definition(self, case, x, gate_up):
        exact = weights(case, *random(case)) / self.divisor(case)
        gate, up = np.split(np.asarray(x, np.float64) @ exact, 2, axis=-1)
        return gate / (1 + np.exp(-gate)) * up


class TestExpandCodes(OpTest):
    op = dequantize_codes
    cases = (*CASES, *WITH_OFFSETS, replace(CASES[-1], name="an order of inputs", width=512, outputs=200))
    usual = ("FP8, half a block", "INT4, groups of 32", "INT8, offsets", "an order of inputs")
    by_row = ()

    @staticmethod
    def is_for(case, implementation):
        return implementation == "triton" or case.width * case.outputs <= 1 << 20

    def arguments(self, case):
        weight = packed(case)
        if case.name == "an order of inputs":
            order = np.random.default_rng(2).permutation(case.width).astype(np.int32)
            weight = replace(weight, order=order)
        return jnp.zeros((1, case.width), jnp.bfloat16), jax.tree.map(jnp.asarray, weight)

    def definition(self, case, x, kernel):
        exact = with_offsets(case)[1] if case in WITH_OFFSETS else weights(case, *random(case))
        rounded = exact.astype(np.float32).astype(jnp.bfloat16)
        return rounded if kernel.order is None else rounded[np.argsort(kernel.order)]


@pytest.mark.parametrize("case", [case for case in CASES if case.width < 1024], ids=lambda case: case.name)
def test_a_packed_weight_is_what_its_codes_stand_for(case):
    arrays = random(case)
    packed = pack_codes(*arrays, (2, case.outputs // 2) if case.scale_rows == 1 else (case.outputs,))
    assert packed.dtype == jnp.bfloat16
    assert packed.shape[0] == case.width
    assert packed.scale_rows == case.scale_rows
    dense = np.asarray(packed)
    assert dense.shape == packed.shape
    np.testing.assert_array_equal(dense.reshape(case.width, -1), weights(case, *arrays), strict=False)


def test_axes_of_inputs_are_joined():
    codes, scale, _ = random(CASES[0])
    packed = pack_codes(codes, scale, None, (96,), inner=(4, 8))
    assert (packed.shape, packed.ndim, packed.size) == ((6, 4, 8, 96), 4, 192 * 96)
    joined = packed.reshape(192, 96)
    assert joined.shape == (192, 96)
    np.testing.assert_array_equal(np.asarray(joined), np.asarray(packed).reshape(192, 96))


def test_random_codes_have_the_zero_points_that_a_benchmark_asks_for():
    with_zeros = random_codes(jax.random.key(0), (512, 64), 4, group=32, has_zero=True)
    assert (np.asarray(with_zeros.scale) & 31 == 8).all()
    without = random_codes(jax.random.key(0), (512, 64), 4, group=32)
    np.testing.assert_allclose(np.asarray(with_zeros), np.asarray(without), rtol=2**-18)


@pytest.mark.parametrize(("width", "group"), [(576, 576), (200, 100), (512, 16), (1024, 512)])
def test_widths_and_groups_that_the_kernel_does_not_read_are_not_packed(width, group):
    codes = np.zeros((8, width), np.uint8)
    assert pack_codes(codes, np.ones((8, width // group), np.float32), None, (8,)) is None


def test_a_scale_without_room_for_a_zero_point_is_not_packed():
    codes, scale = np.zeros((8, 256), np.uint8), np.full((8, 2), 1 / 3, np.float32)
    assert pack_codes(codes, scale, np.zeros((8, 2), np.uint8), (8,)) is None
    assert pack_codes(codes, scale, None, (8,)) is not None


def test_the_kernels_ptx_dequantizes_every_code_of_int8():
    words = np.arange(1 << 16, dtype=np.uint16)
    written = run_ptx(codes_ptx.INT8, {"$2": words.view(np.uint32)}, 2)
    for i, values in enumerate(written):
        expected = (words >> 8 * i).astype(np.uint8).view(np.int8).astype(np.float32)
        np.testing.assert_array_equal(values.view(np.uint16).view(ml_dtypes.bfloat16), expected)


def test_the_kernels_ptx_dequantizes_every_code_of_fp8():
    words = np.arange(1 << 16, dtype=np.uint16)
    written = run_ptx(codes_ptx.FP8, {"$2": words.view(np.uint32)}, 2)
    for i, values in enumerate(written):
        codes = (words >> 8 * i).astype(np.uint8)
        number = codes & 127 != 127
        expected = codes.view(ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16).view(np.uint16)
        np.testing.assert_array_equal(values.view(np.uint16)[number], expected[number])


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("INT4", (None,) * 4),
        ("INT4_OFFSETS", (5, 5, 6, 6)),
        ("INT4_EACH_OFFSET", (5, 6, 7, 8)),
    ],
)
def test_the_kernels_ptx_dequantizes_every_code_of_four_bits(text, operands):
    words = np.arange(1 << 16, dtype=np.uint16)
    zeros = {operand: np.full(1 << 16, 3 * operand - 9) for operand in operands if operand}
    offsets = {f"${each}": (-128.0 - zero).astype(ml_dtypes.bfloat16) for each, zero in zeros.items()}
    inputs = {"$4": words.view(np.uint32)} | {name: a.view(np.uint32) for name, a in offsets.items()}
    written = run_ptx(getattr(codes_ptx, text), inputs)
    for i, (values, operand) in enumerate(zip(written, operands, strict=True)):
        zero = 8 if operand is None else zeros[operand]
        expected = (words >> 4 * i & 15).astype(np.float32) - zero
        np.testing.assert_array_equal(values.view(np.uint16).view(ml_dtypes.bfloat16), expected)


@pytest.mark.parametrize("code", range(4))
def test_the_kernels_ptx_scales_a_code_and_rounds_it_once(code):
    words = np.arange(1 << 16, dtype=np.uint16)
    scale = np.random.default_rng(code).uniform(0.5, 2, 1 << 16).astype(np.float16).astype(np.float32)
    high = scale.astype(ml_dtypes.bfloat16)
    low = (scale - high.astype(np.float32)).astype(ml_dtypes.bfloat16)
    offset = np.full(1 << 16, -128 - 5).astype(ml_dtypes.bfloat16)
    text = codes_ptx.one_code(4, code, is_int8=False, is_scaled=True)
    inputs = {f"${i + 1}": each.view(np.uint32) for i, each in enumerate((words, offset, high, low))}
    (values,) = run_ptx(text, inputs, 1)
    exact = ((words >> 4 * code & 15).astype(np.float32) - 5) * scale
    written = values.view(np.uint16).view(ml_dtypes.bfloat16)
    assert (written == exact.astype(ml_dtypes.bfloat16)).mean() > 0.995
    np.testing.assert_allclose(written.astype(np.float32), exact, rtol=2**-8)


@pytest.mark.parametrize(("bits", "is_int8"), [(8, False), (8, True)])
def test_one_code_is_dequantized_as_all_are(bits, is_int8):
    words = {"$2": np.arange(1 << 16, dtype=np.uint16).view(np.uint32)}
    both = run_ptx(codes_ptx.INT8 if is_int8 else codes_ptx.FP8, words, 2)
    for code, expected in enumerate(both):
        text = codes_ptx.one_code(16 // bits, code, is_int8=is_int8, is_scaled=False)
        (written,) = run_ptx(text, {"$1": words["$2"]}, 1)
        np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize(
    ("tiles", "steps", "plan"),
    [
        (448, 16, (3 * PROGRAMS, 2)),
        (160, 56, (PROGRAMS, 4)),
        (32, 56, (0, 4)),
        (896, 16, (896, 1)),
        (PROGRAMS, 56, (PROGRAMS, 1)),
        (1, 1, (1, 1)),
    ],
    ids=["4th round is part", "2nd round is part", "few tiles", "full rounds", "one round", "one step"],
)
def test_tiles_are_split_where_programs_would_have_none(tiles, steps, plan):
    assert split_tiles(tiles, steps, 4, MANY_ROWS) == plan


def test_hoppers_kernel_reads_whole_tiles_without_offsets_on_hopper(monkeypatch):
    monkeypatch.setattr(hopper_tiles, "why_not", lambda implementation: None)
    monkeypatch.setattr(hopper_tiles, "device", lambda: SimpleNamespace(compute_capability="9.0"))
    tiled = CodedWeight(np.zeros((2, 4, 64, 128), np.uint8), np.zeros((8, 128), np.uint32), bits=4)
    assert is_for_hopper(tiled)
    assert is_for_hopper(replace(tiled, codes=np.zeros((128, 4, 1, 128), np.uint8)))  # rows, as cuBLAS reads
    assert not is_for_hopper(replace(tiled, offset=np.zeros((16, 128), np.float32)))
    assert not is_for_hopper(replace(tiled, codes=np.zeros((4, 4, 32, 128), np.uint8)))
    assert not is_for_hopper(replace(tiled, codes=np.zeros((2, 8, 64, 64), np.uint8)))
    monkeypatch.setattr(hopper_tiles, "device", lambda: SimpleNamespace(compute_capability="8.9"))
    assert not is_for_hopper(tiled)
