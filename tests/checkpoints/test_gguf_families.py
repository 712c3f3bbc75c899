"""A GGUF of every family is the network that the checkpoint on the Hub is, weight by weight."""

from dataclasses import replace

import numpy as np
import pytest
from converted_gguf import ARCHITECTURES, write_converted
from golden_files import golden_checkpoint

from jaxspec.checkpoints import open_checkpoint
from jaxspec.checkpoints.gguf_architecture import ARCHITECTURES as READ
from jaxspec.checkpoints.mxfp4 import Mxfp4Tensor
from jaxspec.config import RopeConfig
from jaxspec.models.loading import target_config
from jaxspec.models.rope import rope_frequencies


def without_dense_layers(checkpoint):
    """Layers 0 and 2 of the golden: the architecture has no place for a dense one."""
    kept = {name: t for name, t in checkpoint.tensors.items() if ".layers.1." not in name}
    tensors = {name.replace(".layers.2.", ".layers.1."): tensor for name, tensor in kept.items()}
    config = {**checkpoint.config, "num_hidden_layers": 2, "layer_types": None, "mlp_only_layers": []}
    return replace(checkpoint, config=config, tensors=tensors)


def with_config(**changes):
    return lambda checkpoint: replace(checkpoint, config={**checkpoint.config, **changes})


def with_rope(**changes):
    return lambda checkpoint: with_config(
        rope_parameters={**checkpoint.config["rope_parameters"], **changes}, num_nextn_predict_layers=0
    )(checkpoint)


CASES = {
    "llama-tied": None,
    "llama-untied-llama3-rope": None,
    "llama-linear-rope": None,
    "llama-yarn-rope": None,
    "qwen2-tied": None,
    "qwen3-tied": None,
    "qwen3-moe": without_dense_layers,
    "gemma3": with_config(query_pre_attn_scalar=16),
    "gpt-oss": None,
    "gpt-oss-mxfp4": None,
    "deepseek-v3": with_rope(mscale=0.6),
    "deepseek-v3-direct": with_config(rope_interleave=True, num_nextn_predict_layers=0),
    "glm4-moe-lite": with_config(model_type="deepseek_v3", num_nextn_predict_layers=0),
}
"""Goldens, with what a file cannot say of them replaced by what it says."""


@pytest.fixture(params=CASES)
def pair(request, tmp_path):
    """A checkpoint on the Hub's layout, and the GGUF of it."""
    change = CASES[request.param] or (lambda checkpoint: checkpoint)
    checkpoint = change(golden_checkpoint(request.param))
    return checkpoint, open_checkpoint(write_converted(tmp_path / "tiny.gguf", checkpoint))


def test_every_tensor_is_the_same(pair):
    expected, found = pair
    assert set(found.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        read = found.tensors[name]
        assert read.shape == tensor.shape
        # Adding 1 to a norm's weights rounds them.
        rounding = 2e-7 if expected.config["model_type"] == "gemma3_text" and "norm" in name else 0
        np.testing.assert_allclose(read.read(), tensor.read(), rtol=0, atol=rounding, err_msg=name)
        assert read.read().dtype == read.dtype
        if isinstance(tensor, Mxfp4Tensor):
            for one, other in zip(read.read_packed(), tensor.read_packed(), strict=True):
                np.testing.assert_array_equal(one, other)


def test_the_network_is_the_same(pair):
    expected, found = (target_config(checkpoint) for checkpoint in pair)
    for one, other in ((expected.rope, found.rope), (expected.local_rope, found.local_rope)):
        if one is None:
            assert other is None
            continue
        frequencies, factor = rope_frequencies(one, expected.head_dim)
        read, read_factor = rope_frequencies(other, found.head_dim)
        np.testing.assert_allclose(read, frequencies, rtol=1e-6)
        assert read_factor == pytest.approx(factor, rel=1e-6)
    scales = [config.attention_scale or config.head_dim**-0.5 for config in (found, expected)]
    assert scales[0] == pytest.approx(scales[1], rel=1e-6)
    same = {"rope": RopeConfig(), "local_rope": None, "attention_scale": None}
    assert replace(found, **same) == replace(expected, **same)


def test_every_architecture_is_tested():
    families = {golden_checkpoint(case).config["model_type"] for case in CASES}
    assert {ARCHITECTURES[family] for family in families} == set(READ)
