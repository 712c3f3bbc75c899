"""Keys that only some families have, or read in their own way, beside what transformers makes of them."""

import copy

import pytest
from golden_files import golden_checkpoint

from jaxspec.config import ConfigError, ModelConfig


def read(case, /, **changes):
    """The shape of a golden with other values, `a__b` for `b` in the object `a`; ... drops a key."""
    config = copy.deepcopy(golden_checkpoint(case).config)
    for key, value in changes.items():
        *path, last = key.split("__")
        place = config.get("text_config", config)
        for each in path:
            place = place[each]
        place[last] = value
        if value is ...:
            del place[last]
    return ModelConfig.from_hf(config)


def of_kind(case, kind):
    config = golden_checkpoint(case).config
    return [kind] * config.get("text_config", config)["num_hidden_layers"]


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("phi3", {"layer_types": of_kind("phi3", "full_attention")}, "layer_types: 'full_attention' is not"),
        ("phi3", {"use_sliding_window": False}, "use_sliding_window False is not supported for this family"),
        ("olmo3", {"use_sliding_window": False}, "use_sliding_window False is not supported for this family"),
        ("qwen3-5-moe", {"norm_topk_prob": False}, "norm_topk_prob False is not supported; supported: True"),
        ("nemotron-h", {"layer_types": ["moe"] * 5}, "layers_block_type and layer_types are not the same"),
        ("gemma4", {"rope_scaling": LINEAR}, "rope_scaling is not supported; supported: rope_parameters by"),
        ("gemma4", {"rope_parameters": LINEAR}, "rope_parameters: sliding_attention needs rope_theta"),
        ("gemma4", {"rope_parameters__full_attention": None}, "full_attention needs rope_theta"),
        ("gemma4", {"rope_parameters__full_attention__rope_type": ...}, "full_attention needs rope_type"),
        ("deepseek-v4", {"rope_scaling": LINEAR}, "rope_scaling is not supported beside rope_parameters"),
        ("deepseek-v4", {"rope_parameters__main__partial_rotary_factor": 0.8}, "factor 0.8 is not 4 entries"),
        ("deepseek-v4", {"head_dim": None}, "head_dim must be a positive integer, got None"),
        ("deepseek-v4", {"q_lora_rank": None}, "q_lora_rank must be a positive integer, got None"),
    ],
)
def test_what_transformers_reads_otherwise_is_refused(case, changes, message):
    with pytest.raises(ConfigError) as caught:
        read(case, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


WINDOWLESS = (
    "olmo2",
    "granite",
    "glm4",
    "minimax-m2",
    "deepseek-v3",
    "glm4-moe-lite",
    "qwen3-vl",
    "qwen3-next",
)


@pytest.mark.parametrize("case", WINDOWLESS)
def test_families_without_windows_ignore_their_size_and_refuse_their_kind(case):
    found = read(case, sliding_window=5, use_sliding_window=True, max_window_layers=1)
    assert found.sliding_window is None
    assert "sliding_attention" not in found.layer_types
    with pytest.raises(ConfigError, match="layer_types: 'sliding_attention' is not supported"):
        read(case, sliding_window=5, layer_types=of_kind(case, "sliding_attention"))


def test_null_says_no_where_transformers_takes_it():
    for case in ("deepseek-v3", "qwen3-moe", "nemotron-h"):
        assert read(case, norm_topk_prob=None).moe.normalize is False
        assert read(case, norm_topk_prob=...).moe.normalize is (case != "qwen3-moe")
    assert read("deepseek-v3", rope_interleave=None).latent.rope_interleave is False
    assert read("deepseek-v3", rope_interleave=...).latent.rope_interleave is True
    assert read("gpt-oss", rope_parameters__truncate=None) == read("gpt-oss", rope_parameters__truncate=False)
    assert read("gpt-oss", rope_parameters__truncate=...) != read("gpt-oss", rope_parameters__truncate=False)
    assert read("nemotron-h", moe_latent_size=None).moe.latent_size == 0


def test_layers_of_nemotron_h_have_two_names():
    kinds = golden_checkpoint("nemotron-h").config["layers_block_type"]
    expected = read("nemotron-h")
    assert read("nemotron-h", layers_block_type=..., layer_types=kinds) == expected
    assert read("nemotron-h", layer_types=kinds) == expected


def test_cosine_and_sine_of_deepseek_v4_are_scaled_if_its_nested_rope_does_not_deny_it():
    stated = read("deepseek-v4", rope_parameters__compress__attention_factor=...)
    assert "attention_factor" not in dict(stated.rope.parameters)
    assert dict(read("deepseek-v4").rope.parameters)["attention_factor"] == 1


def test_nulls_inside_objects_are_absent():
    rates = read("deepseek-v4", compress_rates__compressed_sparse_attention=None)
    assert rates == read("deepseek-v4", compress_rates__compressed_sparse_attention=...)
    assert read("llama-yarn-rope", rope_parameters__beta_fast=None) == read("llama-yarn-rope")
