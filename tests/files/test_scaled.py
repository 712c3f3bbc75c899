"""Matrices of eight-bit floats with a scale per block, against the definition, and pairs that do not fit."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.files import CheckpointError, open_checkpoint


def write(folder, arrays, *, block=(3, 4)):
    folder.mkdir()
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block and list(block)}
    config = {"model_type": "deepseek_v3", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(arrays, folder / "model.safetensors")
    return open_checkpoint(folder)


def pair():
    """A matrix of 7 x 10: its last blocks are cut off both ways."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(7, 10)).astype(ml_dtypes.float8_e4m3fn)
    return {"w": values, "w_scale_inv": rng.uniform(0.1, 3, (3, 3)).astype(np.float32)}


def test_values_follow_the_definition(tmp_path):
    arrays = pair()
    tensors = write(tmp_path / "model", {**arrays, "norm": np.ones(4, np.float32)}).tensors
    assert set(tensors) == {"w", "norm"}
    assert tensors["w"].shape == (7, 10)
    read = tensors["w"].read()
    assert read.dtype == tensors["w"].dtype == np.float32
    for i, j in np.ndindex(7, 10):
        assert read[i, j] == np.float32(arrays["w"][i, j]) * arrays["w_scale_inv"][i // 3, j // 4]


@pytest.mark.parametrize(
    ("change", "block", "message"),
    [
        ({"w": None}, (3, 4), "tensor 'w' is missing; 'w_scale_inv' is its scale"),
        ({"w_scale_inv": None}, (3, 4), "tensor 'w_scale_inv' is missing; 'w' is float8_e4m3fn"),
        (
            {"w_scale_inv": np.ones((3, 2), np.float32)},
            (3, 4),
            r"expected floats of \[3, 3\] .* blocks of \[3, 4\]",
        ),
        ({"w_scale_inv": np.ones(3, np.float32)}, (3, 4), r"expected floats of \[3, 3\]"),
        ({}, (4, 4), r"expected floats of \[2, 3\]"),
        ({}, None, r"of shape \[3, 3\], expected floats of \[7, 1\]"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, change, block, message):
    arrays = {name: array for name, array in {**pair(), **change}.items() if array is not None}
    with pytest.raises(CheckpointError, match=message) as error:
        write(tmp_path / "model", arrays, block=block)
    assert "\n" not in str(error.value)
