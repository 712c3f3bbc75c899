"""Quantized checkpoints against the libraries that define them, and tensors that do not belong together."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from fuzzing import changed, refused_or
from golden_files import FOLDER, QUANTIZED, quantized_copy, quantized_folder
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tiny_gguf import write_packed_gguf
from tiny_models import write_target

from jaxspec.commands.inspect import main as inspect
from jaxspec.files import CheckpointError, open_checkpoint
from jaxspec.files.quantized.quantization import dequantized_tensors
from jaxspec.files.safetensors.tensors import open_safetensors

Q_PROJ = "model.layers.0.self_attn.q_proj"
FORMS = {
    "fp8-blocks": ("FP8 in blocks of 32 x 64", "FP8 in blocks of 32 x 64"),
    "fp8-channel": ("FP8 by channel", "FP8 by channel"),
    "fp8-tensor": ("FP8 by tensor", "FP8 by tensor"),
    "int8-channel": ("INT8 by channel", "INT8 by channel"),
    "int4-groups": ("INT4 by channel", "INT4 in groups of 64"),
    "int4-zero-points": ("INT4 in groups of 32", "INT4 in groups of 32"),
    "int4-channel": ("INT4 by channel", "INT4 by channel"),
}
"""The format of `q_proj`, of 64 inputs, and of `down_proj`, of 128; of others it is INT4 in groups of 32."""


@pytest.mark.parametrize("case", QUANTIZED)
def test_weights_are_those_that_the_formats_library_dequantizes(case):
    tensors = open_checkpoint(quantized_folder(case)).tensors
    expected = load_file(FOLDER / "quantized" / case / "expected.safetensors")
    assert len(expected) == 3
    for name, weight in expected.items():
        read = tensors[name].read()
        assert read.dtype == tensors[name].dtype == np.float32
        assert read.shape == tensors[name].shape == weight.shape
        assert len(np.unique(read)) > 30
        np.testing.assert_array_equal(read.astype(weight.dtype), weight)


@pytest.mark.parametrize("case", QUANTIZED)
def test_a_tensor_says_its_format(case):
    tensors = open_checkpoint(quantized_folder(case)).tensors
    found = tensors[f"{Q_PROJ}.weight"].form, tensors["model.layers.0.mlp.down_proj.weight"].form
    assert found == FORMS.get(case, ("INT4 in groups of 32",) * 2)


def scheme(**weights):
    """The settings of one scheme of compressed-tensors."""
    usual = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    return {"config_groups": {"group_0": {"weights": {**usual, **weights}}}}


HALF = slice(None, None, 2)
Q, D = Q_PROJ, "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("case", "tensors", "message"),
    [
        ("awq", {f"{Q}.scales": None}, f"tensor '{Q}.scales' is missing; '{Q}.qweight' needs it"),
        ("awq", {f"{Q}.qzeros": None}, f"tensor '{Q}.qzeros' is missing; '{Q}.qweight' needs it"),
        ("awq", {f"{Q}.qzeros": lambda a: a[:1]}, f"'{Q}.qzeros' has shape [1, 8], expected [2, 8] beside"),
        ("awq", {f"{Q}.scales": lambda a: a[:, HALF]}, f"'{Q}.scales' has shape [2, 32], expected [2, 64]"),
        ("awq", {f"{Q}.qweight": lambda a: a.astype(np.int16)}, f"'{Q}.qweight' is int16, expected int32"),
        ("awq", {f"{Q}.qweight": lambda a: a[0]}, f"'{Q}.qweight' has shape [8], expected a matrix of words"),
        ("awq", {f"{Q}.weight": np.ones((2, 2), np.float16)}, f"'{Q}.weight' stands beside '{Q}.qweight'"),
        ("gptq", {f"{Q}.qzeros": None}, f"tensor '{Q}.qzeros' is missing"),
        ("gptq", {f"{Q}.scales": lambda a: a.astype(np.int32)}, f"'{Q}.scales' is int32, expected floats"),
        ("gptq", {f"{Q}.g_idx": lambda a: a[HALF]}, f"'{Q}.g_idx' has shape [32], expected [64]"),
        ("gptq", {f"{Q}.g_idx": lambda a: a + 1}, f"groups of '{Q}.qweight' are 1 to 2, and it has 2"),
        ("gptq", {f"{Q}.g_idx": lambda a: a - 1}, f"groups of '{Q}.qweight' are -1 to 0, and it has 2"),
        ("int4-groups", {f"{Q}.weight_scale": None}, f"tensor '{Q}.weight_scale' is missing"),
        ("int4-groups", {f"{Q}.weight_shape": None}, f"tensor '{Q}.weight_shape' is missing"),
        (
            "int4-groups",
            {f"{Q}.weight_shape": lambda a: a * 2},
            f"'{Q}.weight_packed' has shape [64, 8], which does not hold [128, 128] integers of 4 bits",
        ),
        ("int4-groups", {f"{Q}.weight_shape": lambda a: -a}, "which does not hold [-64, -64] integers"),
        (
            "int4-groups",
            {f"{Q}.weight_shape": lambda a: a.astype(np.float32)},
            f"'{Q}.weight_shape' is float32 of shape [2], expected two integers",
        ),
        (
            "int4-zero-points",
            {f"{Q}.weight_scale": lambda a: a[:, :1]},
            f"'{Q}.weight_scale' has shape [64, 1], expected [64, 2] beside",
        ),
        ("int4-zero-points", {f"{Q}.weight_zero_point": None}, f"tensor '{Q}.weight_zero_point' is missing"),
        (
            "int4-zero-points",
            {f"{Q}.weight_zero_point": lambda a: a[1:]},
            f"'{Q}.weight_zero_point' has shape [7, 2], expected [8, 2]",
        ),
        (
            "fp8-channel",
            {f"{Q}.weight_scale": None},
            f"tensor '{Q}.weight_scale' is missing; '{Q}.weight' is",
        ),
        ("fp8-channel", {f"{Q}.weight": None}, f"tensor '{Q}.weight' is missing; '{Q}.weight_scale' is its"),
        (
            "fp8-channel",
            {f"{Q}.weight_scale": lambda a: a[HALF]},
            f"'{Q}.weight_scale' is bfloat16 of shape [32, 1], expected floats of [64, 1] for '{Q}.weight'",
        ),
        (
            "fp8-channel",
            {f"{Q}.weight": lambda a: a.view(ml_dtypes.float8_e5m2)},
            f"'{Q}.weight' is float8_e5m2, which is not supported: float8_e4m3fn is",
        ),
        (
            "int8-channel",
            {f"{Q}.weight_zero_point": np.zeros((3, 1), np.int8)},
            f"'{Q}.weight_zero_point' is int8 of shape [3, 1], expected int8 of [64, 1]",
        ),
    ],
)
def test_tensors_that_do_not_belong_together_are_named(tmp_path, case, tensors, message):
    folder = quantized_copy(tmp_path, case, tensors=tensors)
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        open_checkpoint(folder).tensors[f"{Q}.weight"].read()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        ("awq", {"group_size": 48}, f"'{D}.qweight' has 128 inputs, which groups of 48 do not divide"),
        ("awq", {"group_size": 64}, f"'{D}.scales' has shape [4, 64], expected [2, 64]"),
        (
            "awq",
            {"group_size": 0},
            "quantization_config.group_size is 0; supported: a number of inputs, or -1",
        ),
        ("awq", {"bits": 8}, "quantization_config.bits is 8; supported: 4"),
        ("awq", {"version": "gemv"}, "quantization_config.version is 'gemv'; supported: gemm"),
        ("gptq", {"bits": 3}, "quantization_config.bits is 3; supported: 4, 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format is 'marlin'"),
        ("gptq", {"dynamic": {"+:x": {"bits": 8}}}, "quantization_config.dynamic is {'+:x'"),
        (
            "int4-groups",
            {"format": "marlin-24"},
            "quantization_config.format is 'marlin-24'; supported: pack-q",
        ),
        (
            "int4-groups",
            {"sparsity_config": {"format": "x"}},
            "quantization_config.sparsity_config is {'format'",
        ),
        ("int4-groups", {"transform_config": {"a": {}}}, "quantization_config.transform_config is {'a'"),
        ("int4-groups", {"config_groups": None}, "quantization_config.config_groups is None"),
        (
            "int4-groups",
            scheme(num_bits=3),
            "quantization_config.config_groups.group_0.weights.num_bits is 3",
        ),
        (
            "int4-groups",
            scheme(strategy="x"),
            "quantization_config.config_groups.group_0.weights.strategy is 'x'",
        ),
        ("int4-groups", scheme(group_size=32), f"'{D}.weight_scale' has shape [64, 2], expected [64, 4]"),
        ("int4-groups", scheme(group_size=64), f"tensor '{D}.weight_zero_point' is missing"),
        ("fp8-blocks", {"weight_block_size": [64, 64]}, f"expected floats of [1, 2] for '{D}.weight'"),
        (
            "fp8-blocks",
            {"weight_block_size": 64},
            "quantization_config.weight_block_size is 64; supported: the",
        ),
        ("fp8-blocks", {"weight_block_size": None}, f"'{D}.weight_scale_inv' is float32 of shape [2, 2]"),
        ("fp8-tensor", {"quant_algo": "NVFP4"}, "quantization_config.quant_algo is 'NVFP4'; supported: FP8,"),
    ],
)
def test_settings_that_do_not_fit_are_named(tmp_path, case, settings, message):
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        open_checkpoint(quantized_copy(tmp_path, case, settings=settings))
    assert "\n" not in str(error.value)


def test_the_older_file_of_modelopt_is_read(tmp_path):
    folder = quantized_copy(tmp_path, "fp8-tensor")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}', "utf-8")
    assert open_checkpoint(folder).tensors[f"{Q}.weight"].form == "FP8 by tensor"


def test_a_zero_point_of_each_kind_of_integer_counts(tmp_path):
    zero = np.arange(-32, 32, dtype=np.int8)[:, None]
    tensors = {f"{Q}.weight_zero_point": zero}
    folder = quantized_copy(tmp_path, "int8-channel", tensors=tensors, settings=None)
    plain = open_checkpoint(quantized_folder("int8-channel")).tensors[f"{Q}.weight"].read_codes()
    read = open_checkpoint(folder).tensors[f"{Q}.weight"].read()
    expected = (plain.values.astype(np.float32) - zero) * plain.scale.astype(np.float32)
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize("case", ["awq", "gptq-act-order", "int4-zero-points", "fp8-blocks", "fp8-tensor"])
@given(data=st.data())
def test_settings_of_other_values_are_read_or_refused(case, data):
    """Whatever the settings are, tensors are read or refused in one line."""
    folder = quantized_folder(case)
    settings = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    keys = (
        "bits",
        "group_size",
        "weight_block_size",
        "config_groups",
        "format",
        "strategy",
        "weights",
        "dynamic",
    )
    broken = data.draw(changed(settings, keys))

    def use():
        tensors = dequantized_tensors(open_safetensors(folder), {"quantization_config": broken}, folder)
        for tensor in tensors.values():
            assert tensor.read().shape == tensor.shape

    refused_or(use)


def test_older_zero_points_and_blocks_mean_the_same(tmp_path):
    expected = open_checkpoint(quantized_folder("int4-zero-points")).tensors[f"{Q}.weight"]
    zero = (expected.read_codes().zero.astype(np.int16) - 8).astype(np.int8)
    folder = quantized_copy(tmp_path, "int4-zero-points", tensors={f"{Q}.weight_zero_point": zero})
    np.testing.assert_array_equal(open_checkpoint(folder).tensors[f"{Q}.weight"].read(), expected.read())
    folder = quantized_copy(tmp_path / "blocks", "fp8-blocks", settings={"weight_block_size": "32x64"})
    assert open_checkpoint(folder).tensors[f"{Q}.weight"].form == "FP8 in blocks of 32 x 64"


def test_inspect_says_the_formats_of_a_gguf(capsys, tmp_path):
    assert inspect([str(write_packed_gguf(tmp_path / "tiny.gguf"))]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index("weights Q8_0 (8.5 bits): 9 matrices")
    assert lines[at + 1] == "float32: 3 vectors"


def test_inspect_says_formats_and_what_stays_wide(capsys):
    assert inspect([str(quantized_folder("int4-groups"))]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index("weights INT4 by channel: 6 matrices")
    assert lines[at + 1 : at + 3] == [
        "INT4 in groups of 64: 1 matrices",
        "bfloat16: lm_head.weight, model.embed_tokens.weight, 3 vectors",
    ]


AWQ = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("case", "key", "settings"),
    [
        ("awq", "quantization_config", {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}),
        ("awq", "quant_config.json", AWQ),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True}),
        ("awq", "quantize_config.json", {**AWQ, "modules_to_not_convert": None}),
        ("gptq", "quantize_config.json", GPTQ),
        ("gptq", "quantize_config.json", {"group_size": 32, "model_file_base_name": "model"}),
        ("gptq", "quant_config.json", GPTQ),
        ("gptq-act-order", "quantize_config.json", {**GPTQ, "desc_act": True}),
        ("gptq-v2", "quantize_config.json", {**GPTQ, "checkpoint_format": "gptq_v2"}),
        ("int4-groups", "compression_config", {}),
        ("int4-groups", "compression_config", {"quant_method": "compressed_tensors"}),
        ("fp8-tensor", "compression_config", {}),
    ],
)
def test_settings_of_older_tools_mean_the_same(tmp_path, case, key, settings):
    folder = quantized_copy(tmp_path, case)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    usual = config.pop("quantization_config")
    if key == "compression_config":
        scheme = {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
        newer = {"format": "float-quantized", "config_groups": {"group_0": scheme}}
        settings = {**(newer if case == "fp8-tensor" else usual), **settings}
        if len(settings) == len(usual):
            settings.pop("quant_method", None)
    if key.endswith(".json"):
        (folder / key).write_text(json.dumps(settings), "utf-8")
    else:
        config[key] = settings
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    found, expected = (open_checkpoint(each).tensors for each in (folder, quantized_folder(case)))
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name].read(), expected[name].read())
        assert getattr(found[name], "form", None) == getattr(expected[name], "form", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"w_bit": 3, "q_group_size": 32}, "quantization_config.bits is 3; supported: 4"),
        ({**AWQ, "version": "GEMV"}, "quantization_config.version is 'GEMV'; supported: gemm"),
        ({**AWQ, "bits": 8}, "quantization_config.w_bit is 4; supported: the value of bits, which is 8"),
        (
            {**GPTQ, "is_marlin_format": True},
            "quantization_config.is_marlin_format is True; supported: False",
        ),
        (GPTQ, "scales' has shape [4, 64], expected [32, 8] beside"),
    ],
)
def test_older_settings_that_do_not_fit_are_named(tmp_path, settings, message):
    folder = quantized_copy(tmp_path, "awq")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "quantize_config.json").write_text(json.dumps(settings), "utf-8")
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value)


def test_a_file_of_settings_beside_dense_weights_says_nothing(tmp_path):
    folder = write_target(tmp_path / "model")
    (folder / "quantize_config.json").write_text('{"bits": 3, "group_size": 7}', "utf-8")
    assert not any(hasattr(tensor, "form") for tensor in open_checkpoint(folder).tensors.values())
