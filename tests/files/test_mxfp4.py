"""MXFP4 blocks against their definition, and pairs that do not belong together."""

from dataclasses import dataclass

import numpy as np
import pytest

from jaxspec.files import CheckpointError
from jaxspec.files.quantized.mxfp4 import dequantize_mxfp4, mxfp4_tensors


@dataclass(frozen=True)
class Stored:
    array: np.ndarray

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return self.array.dtype

    def read(self):
        return self.array


def e2m1(code):
    """The value of a four-bit float: a sign, two bits of exponent of bias 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -magnitude if sign else magnitude


def random_pair(rng, experts=2, out=3, groups=2):
    blocks = rng.integers(0, 256, (experts, out, groups, 16), dtype=np.uint8)
    return blocks, rng.integers(0, 255, blocks.shape[:-1], dtype=np.uint8)


def test_values_follow_the_definition():
    blocks, scales = random_pair(np.random.default_rng(0))
    values = dequantize_mxfp4(blocks, scales)
    assert values.shape == (2, 3, 64)
    for expert, out, i in np.ndindex(values.shape):
        byte = int(blocks[expert, out, i // 32, i % 32 // 2])
        code = byte >> 4 if i % 2 else byte & 15
        exponent = int(scales[expert, out, i // 32]) - 127
        assert values[expert, out, i] == np.float32(e2m1(code) * 2.0**exponent)


def test_a_pair_is_one_tensor_with_its_input_first():
    blocks, scales = random_pair(np.random.default_rng(1))
    tensors = mxfp4_tensors(
        {"w_blocks": Stored(blocks), "w_scales": Stored(scales), "b": Stored(np.ones(3))}, "model"
    )
    assert set(tensors) == {"w", "b"}
    assert tensors["w"].shape == (2, 64, 3)
    read = tensors["w"].read()
    assert read.dtype == tensors["w"].dtype
    np.testing.assert_array_equal(read.astype(np.float32), dequantize_mxfp4(blocks, scales).swapaxes(1, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_scales": None}, "model: tensor 'w_scales' is missing; 'w_blocks' needs it"),
        ({"w_scales": np.zeros((2, 3, 1), np.uint8)}, "are not MXFP4"),
        ({"w_blocks": np.zeros((2, 3, 2, 8), np.uint8)}, "are not MXFP4"),
        ({"w_blocks": np.zeros((2, 3, 2, 16), np.int8)}, "are not MXFP4"),
    ],
)
def test_pairs_that_do_not_belong_together_are_refused(change, message):
    blocks, scales = random_pair(np.random.default_rng(2))
    arrays = {"w_blocks": blocks, "w_scales": scales, **change}
    with pytest.raises(CheckpointError, match=message) as error:
        mxfp4_tensors({name: Stored(a) for name, a in arrays.items() if a is not None}, "model")
    assert "\n" not in str(error.value)


def test_what_is_read_packed_is_what_is_stored_input_first():
    blocks, scales = random_pair(np.random.default_rng(3))
    tensor = mxfp4_tensors({"w_blocks": Stored(blocks), "w_scales": Stored(scales)}, "model")["w"]
    values, exponents = tensor.read_packed()
    np.testing.assert_array_equal(exponents, scales.swapaxes(1, 2))
    for expert, i, out in np.ndindex(values.shape):
        assert values[expert, i, out] == blocks[expert, out, i // 16, i % 16]
