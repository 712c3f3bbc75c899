"""Tensors that other loaders pass over on purpose: weights are those without them, or refused."""

import json
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_files import quantized_copy, quantized_folder
from safetensors.numpy import load_file, save_file
from tiny_models import write_target

from jaxspec.files import CheckpointError, open_checkpoint
from jaxspec.models.target import load_target
from jaxspec.weights.loading import export_tensors

LAYER = "model.layers.0"
Q, ATTENTION = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn"
ONE = np.ones(1, np.float32)
BF16 = ml_dtypes.bfloat16


def weights(folder):
    return export_tensors(load_target(open_checkpoint(folder), dtype=jnp.float32))


GROUPS = {f"{Q}.g_idx": np.arange(64, dtype=np.int32) // 32}
UNSET = {f"{Q}.weight_g_idx": np.full(64, -1, np.int32)}
ROUNDINGS = (
    *(f"{Q}.input_scale", f"{Q}.input_zero_point", f"{Q}.output_scale", f"{Q}.activation_scale"),
    *(f"{Q}.input_scale_ub", f"{Q}.weight_scale_ub", f"{Q}.input_quantizer._amax"),
    *(f"{ATTENTION}.{one}_{what}" for one in "qkv" for what in ("scale", "zero_point")),
    *(f"{ATTENTION}.kv_scale", f"{ATTENTION}.attn.k_scale", f"{ATTENTION}.k_proj.k_scale"),
    *(f"{ATTENTION}.k_cache.scale", f"{ATTENTION}.v_cache_scale", f"{ATTENTION}.prob_output_scale"),
)


@pytest.mark.parametrize(
    ("case", "tensors", "settings"),
    [
        ("gptq", {f"{Q}.bias": np.zeros(64, np.float16)}, {}),
        ("awq", {f"{Q}.bias": np.zeros(64, np.float16), "lm_head.bias": np.zeros(64, np.float16)}, {}),
        ("awq", GROUPS, {}),
        ("int4-groups", UNSET, {}),
        ("fp8-tensor", dict.fromkeys(ROUNDINGS, ONE), {}),
        ("fp8-blocks", {f"{Q}.input_scale": ONE, f"{ATTENTION}.k_scale": ONE}, {}),
        ("fp8-blocks", {"lm_head.weight_scale_inv": np.ones((2, 1), np.float32)}, {}),
        ("fp8-channel", {"lm_head.weight_scale": np.ones((64, 1), BF16)}, {}),
        ("fp8-channel", {f"{Q}.weight_zero_point": np.zeros((64, 1), ml_dtypes.float8_e4m3fn)}, {}),
        ("int8-channel", {f"{Q}.weight_zero_point": np.zeros((64, 1), np.int32)}, {}),
        ("int4-groups", {"lm_head.weight_shape": np.array([64, 64]), "lm_head.weight_scale": ONE}, {}),
        ("gptq", {"lm_head.scales": ONE, "lm_head.qzeros": ONE, "lm_head.g_idx": ONE}, {}),
        ("awq", {f"{ATTENTION}.rotary_emb.inv_freq": ONE, "model.rotary_emb.cos_cached": ONE}, {}),
        ("int4-groups", {}, {"kv_cache_scheme": {"num_bits": 8}}),
    ],
)
def test_what_other_loaders_skip_is_skipped(tmp_path, case, tensors, settings):
    folder = quantized_copy(tmp_path, case, tensors=tensors, settings=settings)
    np.testing.assert_equal(weights(folder), weights(quantized_folder(case)))


@pytest.mark.parametrize(
    ("case", "tensors", "message"),
    [
        ("gptq", {f"{Q}.bias": np.eye(64, dtype=np.float16)[3]}, f"spare tensor '{Q}.bias' of shape [64]"),
        ("gptq", {"model.other.bias": np.zeros(8, np.float16)}, "spare tensor 'model.other.bias'"),
        (
            "awq",
            {f"{Q}.g_idx": np.arange(64, dtype=np.int32) % 2},
            "are not adjacent inputs, as AWQ has them",
        ),
        (
            "fp8-channel",
            {f"{Q}.weight_zero_point": np.ones((64, 1), ml_dtypes.float8_e4m3fn)},
            "are float8_e4m3fn, not all zero, and beside float8_e4m3fn",
        ),
        (
            "int8-channel",
            {f"{Q}.weight_zero_point": np.ones((64, 1), np.int32)},
            "are int32, not all zero, and beside int8",
        ),
        (
            "fp8-channel",
            {f"{Q}.weight": lambda codes: codes.astype(BF16)},
            f"'{Q}.weight' is bfloat16 and reaches 448, which its scale does not allow",
        ),
    ],
)
def test_what_would_change_answers_is_refused(tmp_path, case, tensors, message):
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        weights(quantized_copy(tmp_path, case, tensors=tensors))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["dense", "fakequant"])
def test_dense_weights_beside_the_scales_of_all_matrices_are_the_weights(tmp_path, form):
    folder = write_target(tmp_path / "model")
    expected = weights(folder)
    arrays = load_file(folder / "model.safetensors")
    matrices = [name for name in arrays if name.endswith("_proj.weight")]
    for name in matrices:
        arrays[f"{name}_scale"] = np.abs(arrays[name]).max(1, keepdims=True) / 127
        arrays[f"{name}_zero_point"] = np.zeros((len(arrays[name]), 1), np.int8)
    save_file(arrays, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    scheme = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "frozen",
        "config_groups": {"group_0": scheme},
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    assert len(matrices) > 10
    np.testing.assert_equal(weights(folder), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}},
    ],
)
def test_a_checkpoint_with_scales_of_its_cache_alone(tmp_path, settings):
    folder = write_target(tmp_path / "model")
    expected = weights(folder)
    scales = {f"{ATTENTION}.{name}_proj.{name}_scale": ONE for name in "kv"}
    save_file({**load_file(folder / "model.safetensors"), **scales}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}), "utf-8")
    np.testing.assert_equal(weights(folder), expected)
