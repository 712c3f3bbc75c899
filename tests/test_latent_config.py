"""Latent attention, and the experts of its families, from `config.json`."""

import json
from pathlib import Path

import pytest
from tiny_models import TARGET
from tiny_mtp import LATENT

from jaxspec.config import ConfigError, ModelConfig, MoeConfig

FULL_SIZE = Path(__file__).parent / "models" / "full_size"


def read(**changes):
    return ModelConfig.from_hf({**TARGET, **LATENT, **changes})


def published(name):
    return ModelConfig.from_hf(json.loads((FULL_SIZE / f"{name}.json").read_text("utf-8")))


def test_the_published_shapes():
    glm, deepseek = published("glm-4.7-flash"), published("deepseek-v3")
    assert (glm.latent.q_lora_rank, glm.latent.kv_lora_rank, glm.head_dim) == (768, 512, 64)
    assert glm.attention_scale == 256**-0.5
    assert glm.moe == MoeConfig(64, 4, 1536, dense_layers=(0,), scale=1.8, shared_size=1536)
    assert deepseek.moe == MoeConfig(
        256,
        8,
        2048,
        dense_layers=(0, 1, 2),
        num_groups=8,
        groups_per_token=4,
        scale=2.5,
        shared_size=2048,
    )
    # YaRN's factor for all dimensions, 0.1 ln 40 + 1, on queries and on keys.
    assert deepseek.attention_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert glm.num_nextn_predict_layers == deepseek.num_nextn_predict_layers == 1


def test_absent_keys_take_the_families_defaults():
    least = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 96}
    for name, family in (("glm-4.7-flash", "glm4_moe_lite"), ("deepseek-v3", "deepseek_v3")):
        config = ModelConfig.from_hf({**least, "model_type": family})
        assert config.latent == published(name).latent
        assert config.moe == published(name).moe
        assert config.rms_norm_eps == published(name).rms_norm_eps


def test_layers_are_listed_or_the_dense_ones_counted():
    assert read(num_hidden_layers=3, first_k_dense_replace=2).moe.dense_layers == (0, 1)
    listed = ["sparse", "dense", "sparse"]
    assert read(num_hidden_layers=3, mlp_layer_types=listed).moe.dense_layers == (1,)


def test_queries_may_be_projected_directly():
    assert read(q_lora_rank=None).latent.q_lora_rank is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias True is not supported in latent attention"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer, got 0"),
        ({"q_lora_rank": "512"}, "q_lora_rank must be a positive integer, got '512'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sigmoid"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported: noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({"n_group": 3}, "4 experts do not make n_group 3 groups"),
        ({"n_group": 4}, "4 experts do not make n_group 4 groups"),
        ({"n_group": 2, "topk_group": 3}, "topk_group 3 is not between 1 and n_group 2"),
        (
            {"n_group": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok 3 is more than the experts of topk_group 1 groups, 2",
        ),
    ],
)
def test_what_is_not_built_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        read(**changes)
    assert "\n" not in str(error.value)
