"""Matrices of eight-bit floats with a scale per block, against the definition, and pairs that do not fit."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoints import CheckpointError, open_checkpoint


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


def v4_pairs():
    """DeepSeek-V4's form: a matrix in blocks whose scales are powers of two, and one of four-bit floats."""
    rng = np.random.default_rng(1)
    exponents = rng.integers(120, 130, (3, 3)).astype(np.uint8)
    return {
        "attn.wkv.weight": rng.normal(size=(7, 10)).astype(ml_dtypes.float8_e4m3fn),
        "attn.wkv.scale": exponents.view(ml_dtypes.float8_e8m0fnu),
        "experts.0.w1.weight": rng.integers(-128, 128, (5, 32)).astype(np.int8),
        "experts.0.w1.scale": rng.integers(120, 130, (5, 2)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu),
    }


def write_v4(folder, arrays):
    # safetensors writes no scales of this type from NumPy.
    names = [name for name, array in arrays.items() if array.dtype == ml_dtypes.float8_e8m0fnu]
    bytes_ = {name: array.view(np.uint8) if name in names else array for name, array in arrays.items()}
    folder.mkdir()
    save_file(bytes_, folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name in names:
        header[name]["dtype"] = "F8_E8M0"
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    quantization = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [3, 4]}
    config = {"model_type": "deepseek_v4", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return open_checkpoint(folder)


FOUR_BITS = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def test_pairs_of_deepseek_v4_follow_the_definition(tmp_path):
    arrays = v4_pairs()
    tensors = write_v4(tmp_path / "model", arrays).tensors
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "attn.wkv.weight": (7, 10),
        "experts.0.w1.weight": (5, 64),
    }
    read = tensors["attn.wkv.weight"].read()
    for i, j in np.ndindex(7, 10):
        scale = 2.0 ** (int(arrays["attn.wkv.scale"].view(np.uint8)[i // 3, j // 4]) - 127)
        assert read[i, j] == (np.float32(arrays["attn.wkv.weight"][i, j]) * scale).astype(ml_dtypes.bfloat16)
    read = tensors["experts.0.w1.weight"].read()
    for i, j in np.ndindex(5, 64):
        code = int(arrays["experts.0.w1.weight"].view(np.uint8)[i, j // 2]) >> 4 * (j % 2) & 15
        value = FOUR_BITS[code & 7] * (-1) ** (code >> 3)
        assert read[i, j] == value * 2.0 ** (
            int(arrays["experts.0.w1.scale"].view(np.uint8)[i, j // 32]) - 127
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn.wkv.weight": None}, "tensor 'attn.wkv.weight' is missing; 'attn.wkv.scale' is its scale"),
        ({"attn.wkv.scale": None}, "'attn.wkv.weight' is float8_e4m3fn"),
        ({"experts.0.w1.weight": np.ones((5, 8), np.int8)}, r"expected \[5, 1\]"),
        ({"experts.0.w1.scale": np.ones((5, 2), np.float32)}, "its scales of float32 are not MXFP4"),
    ],
)
def test_pairs_of_deepseek_v4_that_do_not_fit_are_refused(tmp_path, change, message):
    arrays = {name: array for name, array in {**v4_pairs(), **change}.items() if array is not None}
    with pytest.raises(CheckpointError, match=message) as error:
        write_v4(tmp_path / "model", arrays)
    assert "\n" not in str(error.value)
