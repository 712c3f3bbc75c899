"""Families of small models against transformers: logits, and greedy answers of 64 tokens from an engine."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_checkpoint, golden_folder, golden_outputs
from paged_rows import PagedTarget
from target_checks import check_export, check_greedy, check_one_pass, check_pieces
from tiny_models import write_dflash, write_eagle1, write_eagle3, write_peagle

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.models.target import load_target, plan_target

CASES = (
    *("olmo2", "olmo3", "smollm3", "smollm3-windowed", "phi3", "phi3-long", "minimax-m2", "granite"),
    *("lfm2-biased", "lfm2"),
)
HEADS = {
    "olmo3": (write_eagle1, "eagle1"),
    "smollm3-windowed": (write_peagle, "peagle"),
    "granite": (write_dflash, "dflash"),
    "minimax-m2": (write_eagle3, "eagle3"),
    "lfm2": (write_eagle3, "eagle3"),
}
"""For some families a head that repeats the last token, whose drafts are sometimes accepted."""


@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize("case", ["olmo3", "smollm3-windowed", "phi3", "lfm2-biased"])
def test_pieces_through_the_cache_equal_one_pass(case):
    check_pieces(case, 5)


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_every_tensor(case):
    check_export(case)


@pytest.mark.parametrize("case", [case for case in (*CASES, "phi3-short") if case not in HEADS])
def test_greedy_answers_are_those_of_transformers(case):
    """Of families without a head below. "phi3-short" is LongRoPE in an engine whose texts are never long."""
    check_greedy(case)


@pytest.mark.parametrize("case", HEADS)
def test_heads_draft_for_them(case, tmp_path):
    write, kind = HEADS[case]
    check_greedy(case, {"kind": kind, "source": str(write(tmp_path / "head", golden_folder(case)))})


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("olmo2", {"rms_norm_eps": 1e-5}),
        ("olmo3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
        ("olmo3", {"sliding_window": 8}),
        ("olmo3", {"layer_types": ["full_attention"] * 5}),
        ("smollm3", {"no_rope_layer_interval": 5, "no_rope_layers": None}),
        ("smollm3-windowed", {"use_sliding_window": False, "layer_types": None}),
        ("phi3", {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_theta": 100.0}}),
        ("phi3", {"sliding_window": None}),
        ("phi3-long", {"max_position_embeddings": 32, "rope_parameters": None}),
        ("granite", {"embedding_multiplier": 5.0}),
        ("granite", {"residual_multiplier": 0.5}),
        ("granite", {"attention_multiplier": 0.4}),
        ("granite", {"logits_scaling": 2.0}),
        ("minimax-m2", {"num_experts_per_tok": 2}),
        ("minimax-m2", {"rope_parameters": {"rope_theta": 100.0}}),
        ("lfm2", {"norm_eps": 1e-5}),
        ("lfm2", {"rope_parameters": None}),
    ],
)
def test_every_part_shows_in_the_goldens(case, change):
    """What the goldens would not notice, they would not test."""
    checkpoint, golden = golden_checkpoint(case), golden_outputs(case)
    model = load_target(replace(checkpoint, config={**checkpoint.config, **change}), dtype=jnp.float32)
    ids = golden["input_ids"].astype(np.int32)
    logits, _, _ = PagedTarget(model, *ids.shape, page_size=16, width=48).feed(ids, [0, 0])
    assert np.abs(np.asarray(logits) - golden["logits"]).max() > 1e-2 * np.abs(golden["logits"]).max()


def test_long_factors_are_for_texts_past_the_trained_length():
    checkpoint = golden_checkpoint("phi3-long")
    plan = plan_target(checkpoint, dtype=jnp.float32)
    assert plan.module.config.rope.divisors[-1] == 6.0
    for length, last in ((32, 2.0), (33, 6.0)):
        module = plan_target(checkpoint, dtype=jnp.float32, max_model_len=length).module
        assert module.config.rope.divisors[-1] == last
        assert module.config.rope["attention_factor"] == plan.module.config.rope["attention_factor"]


LEAST = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}
LFM2 = {"model_type": "lfm2", "num_key_value_heads": 2}


def test_what_published_files_say():
    olmo = ModelConfig.from_hf(
        {
            **LEAST,
            "model_type": "olmo3",
            "rope_theta": 500000,
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
        }
    )
    assert (olmo.rope.kind, olmo.rope.theta) == ("yarn", 500000.0)
    assert (olmo.local_rope.kind, olmo.local_rope.theta) == ("default", 500000.0)
    assert olmo.layer_types == (*("sliding_attention",) * 3, "full_attention", "sliding_attention")
    assert olmo.sliding_window == 4096
    lists = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    for name in ("su", "yarn", "longrope"):
        phi = ModelConfig.from_hf({**LEAST, "model_type": "phi3", "rope_scaling": {"type": name, **lists}})
        assert (phi.rope.kind, phi.rope["attention_factor"], phi.rope.length) == ("longrope", 1.0, 4096)
    minimax = {
        **{key: value for key, value in LEAST.items() if key != "hidden_size"},
        "model_type": "minimax_m2",
        "rotary_dim": 64,
        "use_qk_norm": True,
        "attn_type_list": [1] * 5,
    }
    rope = ModelConfig.from_hf({**minimax, "num_key_value_heads": 2}).rope
    assert (rope.theta, rope.share) == (5e6, 0.5)
    smollm = ModelConfig.from_hf({**LEAST, "model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0, 1, 1]})
    assert smollm.no_rope_layers == (1, 1, 1, 0, 1)
    assert (smollm.rope.theta, smollm.tie_word_embeddings) == (2e6, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries for 5 layers"),
        ({"model_type": "granite", "residual_multiplier": "1"}, "residual_multiplier must be a number"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling must be a number above 0, got 0"),
        (
            {
                "model_type": "phi3",
                "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]},
            },
            "rope_scaling: 1 entries of short_factor for 6 frequencies",
        ),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "needs short_factor, long_factor"),
        ({"model_type": "minimax_m2", "attn_type_list": [1, 0]}, "attn_type_list with linear attention"),
        ({"model_type": "minimax_m2", "qk_norm_type": "per_head"}, "qk_norm_type 'per_head' is not supp"),
        ({**LFM2, "conv_L_cache": 1}, "conv_L_cache 1 is not supported"),
        ({**LFM2, "layer_types": ["mamba"] * 5}, "layer_types: unknown kind 'mamba'"),
        ({"model_type": "olmo2", "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**LEAST, **change})
