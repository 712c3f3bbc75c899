"""DeepSeek-V4's pairs of weights and scales, against the definition, and pairs that do not fit."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.files import CheckpointError, open_checkpoint


def v4_pairs():
    """A matrix in blocks whose scales are powers of two, and one of four-bit floats."""
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
        assert read[i, j] == np.float32(arrays["attn.wkv.weight"][i, j]) * scale
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
        ({"experts.0.w1.weight": np.ones((5, 8), np.int8)}, "are not MXFP4"),
        (
            {"experts.0.w1.scale": np.ones((5, 2), np.float32)},
            r"scale, float32 of .*, are not MXFP4",
        ),
    ],
)
def test_pairs_of_deepseek_v4_that_do_not_fit_are_refused(tmp_path, change, message):
    arrays = {name: array for name, array in {**v4_pairs(), **change}.items() if array is not None}
    with pytest.raises(CheckpointError, match=message) as error:
        write_v4(tmp_path / "model", arrays)
    assert "\n" not in str(error.value)
