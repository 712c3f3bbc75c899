"""Gemma 4 against transformers: two sizes of heads, shared caches, embeddings of layers, experts."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_checkpoint, golden_folder, golden_outputs
from paged_rows import PagedTarget
from target_checks import check_export, check_greedy, check_one_pass, check_pieces
from tiny_models import write_dflash, write_eagle3

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.models.target import load_target

CASES = ("gemma4", "gemma4-moe")


@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize("case", CASES)
def test_pieces_through_the_cache_equal_one_pass(case):
    check_pieces(case, 5)


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_every_tensor(case):
    check_export(case)


@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_are_those_of_transformers(case):
    check_greedy(case)


@pytest.mark.parametrize(("write", "kind"), [(write_dflash, "dflash"), (write_eagle3, "eagle3")])
def test_heads_draft_for_it(write, kind, tmp_path):
    check_greedy("gemma4", {"kind": kind, "source": str(write(tmp_path / "head", golden_folder("gemma4")))})


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("gemma4", {"final_logit_softcapping": 30.0}),
        ("gemma4", {"sliding_window": 8}),
        ("gemma4", {"rope_parameters": None}),
        ("gemma4-moe", {"top_k_experts": 1}),
    ],
)
def test_every_part_shows_in_the_goldens(case, change):
    """What the goldens would not notice, they would not test."""
    checkpoint, golden = golden_checkpoint(case), golden_outputs(case)
    model = load_target(replace(checkpoint, config={**checkpoint.config, **change}), dtype=jnp.float32)
    ids = golden["input_ids"].astype(np.int32)
    logits, _, _ = PagedTarget(model, *ids.shape, page_size=16, width=48).feed(ids, [0, 0])
    assert np.abs(np.asarray(logits) - golden["logits"]).max() > 1e-2 * np.abs(golden["logits"]).max()


def test_keys_and_values_of_layers_that_share_are_left_out():
    """Published files hold them."""
    checkpoint = golden_checkpoint("gemma4")
    some = checkpoint.tensors["model.layers.3.self_attn.k_proj.weight"]
    spare = {
        f"model.layers.{layer}.self_attn.{leaf}.weight": some for layer in (4, 5) for leaf in ("k_proj",)
    }
    model = load_target(replace(checkpoint, tensors={**checkpoint.tensors, **spare}), dtype=jnp.float32)
    assert model.cache_shapes[4:] == ((), ())


PUBLISHED = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}


def test_what_published_files_say():
    config = ModelConfig.from_hf(PUBLISHED)
    assert [config.of_layer(layer).head_dim for layer in (4, 5)] == [256, 512]
    assert [config.of_layer(layer).num_key_value_heads for layer in (4, 5)] == [8, 2]
    assert (config.rope.kind, config.rope.theta, config.rope.share) == ("proportional", 1e6, 0.25)
    assert (config.local_rope.kind, config.local_rope.theta, config.sliding_window) == ("default", 1e4, 512)
    over = config.over(16)
    assert [over.of_layer(layer).num_cached_heads for layer in (4, 5)] == [16, 16]
    assert ModelConfig.from_hf({**PUBLISHED, "attention_k_eq_v": False}).global_kv_heads == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers 6: no layer before has 'full_attention'"),
        ({"enable_moe_block": True}, "enable_moe_block is set, but num_experts is missing"),
        ({"per_layer_config": {"5": {"head_dim": "8"}}}, "per_layer_config: head_dim '8' is not supported"),
        ({"per_layer_config": {"4": {"head_dim": 8}}}, "per_layer_config differs among layers of one kind"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
    ],
)
def test_what_is_not_built_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**PUBLISHED, **change})
