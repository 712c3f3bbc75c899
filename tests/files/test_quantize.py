"""Matrices rounded by `jaxspec convert --quantize` are read back with the least error that a scale gives."""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from golden_files import quantized_folder
from tiny_folder import write_folder

from jaxspec.commands.convert import main as convert
from jaxspec.files import CheckpointError, open_checkpoint, save_safetensors
from jaxspec.files.quantized.codes import stored_forms
from jaxspec.files.quantized.quantize import round_output_rows

NAME = "model.layers.0.mlp.down_proj.weight"


class Stored:
    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self):
        return self.array


def matrix():
    """Rows of several sizes with outliers, a row of zeros, and more rows than are rounded at once."""
    rng = np.random.default_rng(0)
    array = rng.normal(size=(300, 256)) * rng.uniform(0.01, 3, (300, 1))
    array[::7, 3] *= 6
    array[5] = 0
    return array.astype(ml_dtypes.bfloat16)


def saved(folder, array, form):
    head = open_checkpoint(quantized_folder("fp8-channel"))
    tensors = {NAME: Stored(array), "lm_head.weight": head.tensors["lm_head.weight"]}
    save_safetensors(folder, replace(head, tensors=tensors), quantize=form, progress=False)
    return open_checkpoint(folder)


@pytest.mark.parametrize(("form", "group", "largest"), [("fp8", 256, 448), ("int4", 128, 7)])
def test_weights_are_rounded_to_the_nearest_with_the_best_of_several_scales(tmp_path, form, group, largest):
    array = matrix()
    tensor = open_checkpoint(saved(tmp_path / "out", array, form).name).tensors[NAME]
    codes = tensor.read_codes()
    assert codes.scale.shape == (300, 256 // group)
    wide = array.astype(np.float64).reshape(300, -1, group)

    def error(scale):
        values = wide / scale[..., None]
        if form == "fp8":
            near = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        else:
            near = np.clip(np.rint(values), -8, 7)
        return np.square(near * scale[..., None] - wide).sum(-1)

    own = np.square(tensor.read().astype(np.float64).reshape(wide.shape) - wide).sum(-1)
    np.testing.assert_allclose(own, error(codes.scale.astype(np.float64)), rtol=1e-3)
    full = np.abs(wide).max(-1) / largest
    full[5] = 1
    tried = [error((full * share).astype(ml_dtypes.bfloat16).astype(np.float64)) for share in (1, 0.9, 0.7)]
    assert (own <= np.min(tried, axis=0) * 1.001).all()
    assert own.sum() < (0.9995 if form == "fp8" else 0.97) * tried[0].sum()
    assert not tensor.read()[5].any()


@pytest.mark.parametrize(
    ("form", "forms", "ignored"),
    [
        ("fp8", ("FP8 by channel: 7 matrices",), ["lm_head", "model.embed_tokens"]),
        ("int4", ("INT4 by channel: 1 matrices",), None),
    ],
)
def test_the_command_rounds_layers_and_says_what_stays_wide(tmp_path, form, forms, ignored):
    source = quantized_folder("int8-channel")
    assert convert([str(source), str(tmp_path / "out"), "--quantize", form]) == 0
    found = open_checkpoint(tmp_path / "out")
    assert stored_forms(found.tensors)[: len(forms)] == forms
    settings = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))["quantization_config"]
    wide = [name.removesuffix(".weight") for name, t in found.tensors.items() if not hasattr(t, "form")]
    assert settings["ignore"] == (ignored or sorted(name for name in wide if "norm" not in name))
    assert found.tensors["lm_head.weight"].dtype == ml_dtypes.bfloat16


def test_what_cannot_be_rounded_is_named(tmp_path, capsys):
    head = open_checkpoint(write_folder(tmp_path / "head"))
    with pytest.raises(CheckpointError, match="head: no matrix of a layer can be rounded to int4"):
        save_safetensors(tmp_path / "out", head, quantize="int4", progress=False)
    with pytest.raises(CheckpointError, match="quantize 'int3' is not known; did you mean 'int4'"):
        save_safetensors(tmp_path / "out", head, quantize="int3", progress=False)
    assert not (tmp_path / "out").exists()
    array = matrix()
    array[7, 9] = np.nan
    with pytest.raises(CheckpointError, match=f"tensor '{NAME}' holds NaN or infinity"):
        saved(tmp_path / "nan", array, "fp8")
    with pytest.raises(SystemExit):
        convert(["a", "b", "--format", "orbax", "--quantize", "fp8"])
    assert "--quantize writes safetensors, not orbax" in capsys.readouterr().err


@pytest.mark.parametrize("has_own", [True, False])
def test_output_rows_are_rounded_and_the_embedding_is_not(has_own):
    rows, table = Stored(matrix()), Stored(matrix())
    named = {"model.embed_tokens.weight": table, **({"lm_head.weight": rows} if has_own else {})}
    found = round_output_rows(named, "fp8")
    assert found["model.embed_tokens.weight"] is table
    assert found["lm_head.weight"].tensor is (rows if has_own else table)
    assert found["lm_head.weight"].form == "FP8 by channel"


def test_output_rows_that_do_not_divide_into_groups_are_not_rounded():
    rows = Stored(np.zeros((8, 192), np.float32))
    with pytest.raises(CheckpointError, match="output rows of 192 inputs cannot be rounded in groups of 128"):
        round_output_rows({"lm_head.weight": rows}, "int4")
