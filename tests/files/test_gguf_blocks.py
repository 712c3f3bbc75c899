"""Integers, scales and offsets are the values that they stand for, to the last bit."""

from dataclasses import fields, replace

import gguf
import ml_dtypes
import numpy as np
import pytest
from tiny_gguf import metadata, write_gguf

from jaxspec.files.gguf import blocks as gguf_blocks
from jaxspec.files.gguf.blocks import unpack_ggml
from jaxspec.files.gguf.header import read_header
from jaxspec.files.gguf.tensor import GGUFTensor
from jaxspec.files.quantized.blocks import Blocks, alike

HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
"""Where the float16 of a block lie, which must be numbers."""


def random_rows(kind, size):
    packed = np.random.default_rng(0).integers(0, 256, (5, 6, size), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = np.random.default_rng(start).normal(size=(5, 6, 1)).astype("<f2")
        packed[..., start : start + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        packed[..., 0] = packed[..., 0] % 251 + 2
    return packed.reshape(5, -1)


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_mean_what_the_gguf_package_reads(kind):
    quantization = gguf.GGMLQuantizationType[kind]
    packed = random_rows(kind, gguf.GGML_QUANT_SIZES[quantization][1])
    expected = gguf.quants.dequantize(packed, quantization)
    blocks = unpack_ggml(packed, quantization).with_float_scales()
    assert blocks.values.shape == expected.shape
    assert blocks.values.dtype == np.int8 or blocks.values.max() < 16
    values = blocks.values.reshape(*blocks.scale.shape, -1).astype(np.float32)
    scaled = values * blocks.scale[..., None]
    wide = values.astype(np.float64) * blocks.scale.astype(np.float64)[..., None]
    np.testing.assert_array_equal(scaled, wide)  # exact: nothing is rounded before the offset
    if blocks.offset is not None:
        scaled += blocks.offset[..., None]
    np.testing.assert_array_equal(scaled.reshape(expected.shape), expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "MXFP4"])
def test_pieces_unpacked_one_after_another_are_the_whole(monkeypatch, kind):
    whole = unpacked(kind)
    row = random_rows(kind, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]).shape[1]
    monkeypatch.setattr(gguf_blocks, "_CACHED", 2 * row)  # of five rows
    pieces = unpacked(kind)
    for field in fields(Blocks):
        one, other = getattr(whole, field.name), getattr(pieces, field.name)
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other, strict=True)


def test_other_formats_are_no_blocks():
    assert unpack_ggml(np.zeros((2, 66), np.uint8), gguf.GGMLQuantizationType.IQ2_XXS) is None


def test_exponents_of_infinite_values_are_no_blocks():
    packed = np.zeros((2, 17), np.uint8)
    packed[1, 0] = 252
    assert np.isfinite(unpack_ggml(packed, gguf.GGMLQuantizationType.MXFP4).with_float_scales().scale).all()
    packed[1, 0] = 253
    assert unpack_ggml(packed, gguf.GGMLQuantizationType.MXFP4) is None


@pytest.mark.parametrize("exponent", [0, 1])
def test_exponents_of_subnormal_values_are_blocks_of_zeros_alone(exponent):
    packed = np.full((2, 17), 0x80, np.uint8)  # zeros of either sign
    packed[:, 0] = exponent
    blocks = unpack_ggml(packed, gguf.GGMLQuantizationType.MXFP4).with_float_scales()
    assert (blocks.values * blocks.scale == 0).all()
    packed[1, 3] = 0x10
    assert unpack_ggml(packed, gguf.GGMLQuantizationType.MXFP4) is None


def dense(blocks):
    blocks = blocks.with_float_scales()
    values = blocks.values.reshape(*blocks.scale.shape, -1) * blocks.scale[..., None]
    return (values if blocks.offset is None else values + blocks.offset[..., None]).reshape(
        blocks.values.shape
    )


def unpacked(kind):
    quantization = gguf.GGMLQuantizationType[kind]
    return unpack_ggml(random_rows(kind, gguf.GGML_QUANT_SIZES[quantization][1]), quantization)


@pytest.mark.parametrize(
    ("kinds", "dtype", "inputs", "has_offset"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), np.int8, 16, True),
        (("Q4_K", "Q2_K"), np.uint8, 16, True),
        (("Q5_K", "Q8_0"), np.int8, 32, True),
        (("Q4_0", "Q4_1"), np.uint8, 32, True),
        (("Q5_0", "Q8_0"), np.int8, 32, False),
        (("Q6_K",), np.int8, 16, False),
        (("MXFP4", "MXFP4"), np.uint8, 32, False),
        (("MXFP4", "Q8_0"), np.int8, 32, False),
        (("MXFP4", "Q4_1"), np.int8, 32, True),
    ],
)
def test_blocks_of_several_formats_take_one_form(kinds, dtype, inputs, has_offset):
    before = [unpacked(kind) for kind in kinds]
    after = alike(before)
    for one, other in zip(after, before, strict=True):
        assert (one.values.dtype, one.inputs, one.offset is not None) == (dtype, inputs, has_offset)
        np.testing.assert_array_equal(dense(one), dense(other))


def test_bfloat16_takes_no_form_of_integers():
    plain = Blocks(np.zeros((2, 32), ml_dtypes.bfloat16))
    assert alike([plain, unpacked("Q8_0")]) is None
    assert alike([plain, plain]) == [plain, plain]


@pytest.mark.parametrize(
    ("kind", "width"), [("Q8_0", 384), ("Q4_K", 768), ("Q6_K", 768), ("MXFP4", 384), ("Q8_0", 96)]
)
def test_inputs_in_tiles_are_put_back(tmp_path, kind, width):
    """Also where one scale of scales covers two heads; heads that share a scale are no blocks."""
    quantization = gguf.GGMLQuantizationType[kind]
    rows = np.random.default_rng(0).normal(size=(5, width)).astype(np.float32)
    if kind == "Q8_0":
        packed = gguf.quants.quantize(rows, quantization)
    else:
        per_row, size = gguf.GGML_QUANT_SIZES[quantization]
        packed = random_rows(kind, size)[:, : width // per_row * size]
    path = write_gguf(tmp_path / "tiny.gguf", metadata(), {"matrix.weight": (packed, kind)})
    header = read_header(path)
    tensor = GGUFTensor(header, header.tensors["matrix.weight"])
    tiled = replace(tensor, tiled_inputs=(2, 3))
    # Head k's part v is at v * 3 + k in the file, and at k * 2 + v on the Hub.
    parts = tensor.read().reshape(5, 2, 3, -1)
    expected = np.stack([parts[:, v, k] for k in range(3) for v in range(2)], axis=1).reshape(5, -1)
    np.testing.assert_array_equal(tiled.read(), expected)
    blocks = tiled.read_blocks()
    if width == 96:
        assert blocks is None
        assert tiled.kind == "Q8_0"
        return
    blocks = blocks.with_float_scales()
    values = blocks.values.reshape(*blocks.scale.shape, -1) * blocks.scale[..., None]
    values = values if blocks.offset is None else values + blocks.offset[..., None]
    np.testing.assert_array_equal(values.reshape(expected.shape), expected)
