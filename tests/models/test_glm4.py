"""GLM-4 against transformers: norms on both sides, rope of pairs in a part of a head, gate and up in one."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_checkpoint, golden_outputs
from paged_rows import PagedTarget
from target_checks import check_export, check_one_pass, check_pieces

from jaxspec.config import ConfigError, ModelConfig, RopeConfig
from jaxspec.models.target import load_target

CASES = ("glm4", "glm4-yarn-rope")


@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize("size", [1, 5])
def test_pieces_through_the_cache_equal_one_pass(size):
    check_pieces("glm4", size)


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_every_tensor(case):
    check_export(case)


@pytest.mark.parametrize("change", [{"partial_rotary_factor": 1.0}, {"rope_theta": 200.0}])
def test_every_part_of_the_rope_shows_in_the_goldens(change):
    """What the goldens would not notice, they would not test."""
    checkpoint, golden = golden_checkpoint("glm4"), golden_outputs("glm4")
    rope = {**checkpoint.config["rope_parameters"], **change}
    config = {**checkpoint.config, "rope_parameters": rope}
    model = load_target(replace(checkpoint, config=config), dtype=jnp.float32)
    ids = golden["input_ids"].astype(np.int32)
    logits, _, _ = PagedTarget(model, *ids.shape, page_size=16, width=48).feed(ids, [0, 0])
    assert np.abs(np.asarray(logits) - golden["logits"]).max() > 1e-2 * np.abs(golden["logits"]).max()


def test_what_a_config_leaves_out_is_what_transformers_assumes():
    config = ModelConfig.from_hf({"model_type": "glm4"})
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (40, 2, 128)
    assert (config.qkv_bias, config.attention_bias, config.mlp_bias) == (True, False, False)
    assert config.rope.rotated(128) == 64
    assert config.rms_norm_eps == 1.5625e-7


def test_biases_that_the_class_has_not_are_never_asked_for():
    config = ModelConfig.from_hf({"model_type": "glm4", "attention_bias": False, "mlp_bias": True})
    assert (config.qkv_bias, config.attention_bias, config.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.25, "partial_rotary_factor 0.25 is 3 of 12 entries, and rope rotates pairs"),
        (0.01, "partial_rotary_factor 0.01 is 0 of 12 entries, and rope rotates pairs"),
        (1.5, "partial_rotary_factor must be at most 1.0, got 1.5"),
        (-0.5, "partial_rotary_factor must be a number above 0, at most 1"),
    ],
)
def test_a_share_that_is_no_number_of_pairs_is_refused(share, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({"model_type": "glm4", "head_dim": 12, "partial_rotary_factor": share})


@pytest.mark.parametrize("size", [12, 49, 80, 98, 128])
def test_a_share_of_so_many_entries_is_that_many(size):
    for count in range(1, size + 1):
        assert RopeConfig(share=count / size).rotated(size) == count
