"""Packed experts are the weights that they stand for, and so is what their PTX makes of them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxspec_kernels.expert_matmul import MAX_SCALE, pack_mxfp4
from jaxspec_kernels.expert_matmul.mxfp4_ptx import EXPAND, FACTOR_BIAS
from ptx import run_ptx

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([VALUES, -VALUES])


def arrays(seed=0, experts=2, width=64, outputs=(2, 5), lowest=1):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (experts, width // 2, *outputs), np.uint8)
    return values, rng.integers(lowest, MAX_SCALE + 1, (experts, width // 32, *outputs), np.uint8)


def test_dequantizes_to_the_weight_by_the_definition():
    values, scale = arrays(lowest=90)
    packed = pack_mxfp4(values, scale)
    assert (packed.shape, packed.ndim, packed.size) == ((2, 64, 2, 5), 4, 1280)
    dense = np.asarray(jax.tree.map(jnp.asarray, packed).dense())
    assert dense.dtype == packed.dtype
    for e, i, *out in np.ndindex(dense.shape):
        byte = values[(e, i // 2, *out)]
        expected = VALUES[byte >> 4 if i % 2 else byte & 15] * 2.0 ** (int(scale[(e, i // 32, *out)]) - 127)
        assert float(dense[(e, i, *out)]) == expected


def test_arrays_that_do_not_belong_together_are_refused():
    values, scale = arrays()
    with pytest.raises(ValueError, match=r"values of shape \(2, 32, 2, 5\) do not fit scales of shape"):
        pack_mxfp4(values, scale[:, :1])
    with pytest.raises(ValueError, match="scale is 129; the largest that stays packed is 128"):
        pack_mxfp4(values, np.full_like(scale, MAX_SCALE + 1))


@pytest.mark.parametrize("scale", [0, 1, 100, 127, MAX_SCALE])
def test_the_kernels_ptx_dequantizes_every_word(scale):
    words = np.arange(1 << 16, dtype=np.uint16)
    factors = np.full_like(words, (scale + FACTOR_BIAS) << 7)
    written = run_ptx(EXPAND, {"$4": words.view(np.uint32), "$5": factors.view(np.uint32)})
    for i, weights in enumerate(written):
        expected = (VALUES[words >> 4 * i & 15] * 2.0 ** (scale - 127)).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(weights.view(np.uint16), expected.view(np.uint16))
