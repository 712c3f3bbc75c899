"""Gemma 3 from `config.json`: published files, files of transformers 5, and unsupported ones."""

import pytest

from jaxspec.config import ConfigError, ModelConfig

GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 7}


def test_absent_keys_take_the_defaults_of_the_family():
    config = ModelConfig.from_hf(GEMMA)
    assert config.layer_types == (*("sliding_attention",) * 5, "full_attention", "sliding_attention")
    assert (config.rope.theta, config.rope.kind, config.local_rope.theta) == (1e6, "default", 1e4)
    assert (config.attention_scale, config.head_dim, config.sliding_window) == (1 / 16, 256, 4096)
    assert (config.tie_word_embeddings, config.qk_norm, config.vocab_size) == (True, True, 262208)


def test_published_files_say_both_ropes_at_the_top():
    scaling = {"factor": 8.0, "rope_type": "linear"}
    config = ModelConfig.from_hf(
        {**GEMMA, "rope_theta": 5e5, "rope_local_base_freq": 500.0, "rope_scaling": scaling}
    )
    assert (config.rope.theta, config.rope.kind, config.rope["factor"]) == (5e5, "linear", 8.0)
    assert (config.local_rope.theta, config.local_rope.kind) == (500.0, "default")


def test_the_pattern_of_windows_is_read():
    config = ModelConfig.from_hf({**GEMMA, "sliding_window_pattern": 3})
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [2, 5]


def test_the_language_model_of_a_nested_configuration_counts():
    nested = {"model_type": "gemma3", "hidden_size": 1, "text_config": GEMMA}
    assert ModelConfig.from_hf(nested) == ModelConfig.from_hf(GEMMA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
    ],
)
def test_what_is_not_built_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        ModelConfig.from_hf({**GEMMA, **changes})
    assert "\n" not in str(error.value)
