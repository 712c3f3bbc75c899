"""Experts, from `config.json`."""

import pytest
from tiny_models import TARGET

from jaxspec.config import ConfigError, ModelConfig, MoeConfig


def model(**changes):
    return ModelConfig.from_hf({**TARGET, **changes})


def test_gpt_oss_takes_the_defaults_of_the_family():
    needed = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    least = {key: TARGET[key] for key in needed}
    config = ModelConfig.from_hf({**least, "model_type": "gpt_oss", "num_attention_heads": 64})
    assert config.moe == MoeConfig(num_experts=128, experts_per_token=4, intermediate_size=48)
    assert config.layer_types == ("sliding_attention", "full_attention")
    assert (config.sliding_window, config.head_dim, config.num_key_value_heads) == (128, 64, 8)
    assert (config.attention_sinks, config.attention_bias, config.rms_norm_eps) == (True, True, 1e-5)
    assert (config.rope.kind, config.rope.theta, config.rope["truncate"]) == ("yarn", 150000.0, False)


@pytest.mark.parametrize("said", [{"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": None}])
def test_gpt_oss_takes_its_default_rope_where_a_file_says_nothing(said):
    rope = model(model_type="gpt_oss", **said).rope
    assert (rope.kind, rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 32.0, 4096)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_gpt_oss_adds_nothing_to_the_rope_of_a_file(key):
    rope = model(model_type="gpt_oss", **{key: {"rope_type": "yarn", "factor": 8.0}}).rope
    assert (rope.kind, rope.theta) == ("yarn", 150000.0)
    # 128 is the file's own length.
    assert dict(rope.parameters) == {"factor": 8.0, "original_max_position_embeddings": 128}


def test_qwen3_moe_reads_either_name_of_the_number_of_experts():
    sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    expected = MoeConfig(num_experts=6, experts_per_token=2, intermediate_size=16)
    assert model(model_type="qwen3_moe", num_experts=6, **sizes).moe == expected
    assert model(model_type="qwen3_moe", num_local_experts=6, **sizes).moe == expected


def test_dense_layers_are_those_named_and_those_between_the_sparse_ones():
    changes = {"model_type": "qwen3_moe", "num_hidden_layers": 6}
    assert model(**changes).moe.dense_layers == ()
    assert model(**changes, mlp_only_layers=[1, 4]).moe.dense_layers == (1, 4)
    assert model(**changes, mlp_only_layers=[5], decoder_sparse_step=3).moe.dense_layers == (0, 1, 3, 4, 5)


def test_qwen3_moe_has_windows_in_every_layer_or_in_none():
    changes = {"model_type": "qwen3_moe", "sliding_window": 8, "max_window_layers": 2}
    assert model(**changes).layer_types == ("full_attention",) * 2
    assert model(**changes, use_sliding_window=True).layer_types == ("sliding_attention",) * 2


def test_dense_families_have_no_experts():
    assert model().moe is None
    assert model(model_type="qwen3").moe is None


def test_more_experts_per_token_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="num_experts_per_tok 5 is not between 1 and") as error:
        model(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=5)
    assert "\n" not in str(error.value)
