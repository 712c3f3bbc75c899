"""DeepSeek-V3 and GLM-4.7-Flash against transformers: latents, ropes, YaRN, groups, ties, shared experts."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_checkpoint, golden_outputs
from paged_rows import PagedTarget
from target_checks import check_export, check_one_pass, check_pieces

from jaxspec.models.families.deepseek.deepseek import DeepseekMoE
from jaxspec.models.layers import latent_attention
from jaxspec.models.layers.transformer import MLP
from jaxspec.models.target import load_target

CASES = ("deepseek-v3", "deepseek-v3-direct", "glm4-moe-lite")


@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize(("case", "size"), [("deepseek-v3", 1), ("deepseek-v3", 5), ("glm4-moe-lite", 4)])
def test_pieces_through_the_cache_equal_one_pass(case, size):
    check_pieces(case, size)


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_every_tensor(case):
    check_export(case)


@pytest.mark.parametrize("case", CASES)
def test_layers_are_dense_where_the_config_says_so(case):
    first, *others = load_target(golden_checkpoint(case), dtype=jnp.float32).layers
    assert isinstance(first.mlp, MLP)
    assert all(isinstance(layer.mlp, DeepseekMoE) for layer in others)


def test_the_cache_holds_one_vector_per_position():
    model = load_target(golden_checkpoint("glm4-moe-lite"), dtype=jnp.float32)
    (shape,) = set(model.cache_shapes)
    assert (shape.num_kv_heads, shape.planes, shape.head_dim) == (1, 1, 16 + 8)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("deepseek-v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek-v3", {"rope_interleave": False}),
        ("deepseek-v3", {"routed_scaling_factor": 2.4}),
        ("deepseek-v3", {"norm_topk_prob": False}),
        ("deepseek-v3-direct", {"topk_group": 3}),
        ("deepseek-v3-direct", {"norm_topk_prob": True}),
        ("deepseek-v3-direct", {"rope_interleave": True}),
        ("glm4-moe-lite", "selection bias"),
        ("glm4-moe-lite", "eps of latents"),
        ("deepseek-v3", "mscale_all_dim"),
    ],
)
def test_every_part_shows_in_the_goldens(case, change, monkeypatch):
    """What the goldens would not notice, they would not test."""
    checkpoint, golden = golden_checkpoint(case), golden_outputs(case)
    if change == "mscale_all_dim":
        rope = {**checkpoint.config["rope_parameters"], "mscale_all_dim": 0.7}
        change = {"rope_parameters": rope}
    if change == "eps of latents":
        monkeypatch.setattr(latent_attention, "LATENT_EPS", 1e-2)
    if isinstance(change, dict):
        checkpoint = replace(checkpoint, config={**checkpoint.config, **change})
    model = load_target(checkpoint, dtype=jnp.float32)
    if change == "selection bias":
        for layer in model.layers:
            if isinstance(layer.mlp, DeepseekMoE):
                layer.mlp.selection_bias.set_value(jnp.zeros(8))
    ids = golden["input_ids"].astype(np.int32)
    logits, _, _ = PagedTarget(model, *ids.shape, page_size=16, width=48).feed(ids, [0, 0])
    assert np.abs(np.asarray(logits) - golden["logits"]).max() > 1e-3 * np.abs(golden["logits"]).max()


def test_the_selection_bias_stays_in_float32():
    model = load_target(golden_checkpoint("glm4-moe-lite"), dtype=jnp.bfloat16)
    assert model.layers[1].mlp.selection_bias[...].dtype == jnp.float32
    assert model.layers[1].mlp.router.kernel[...].dtype == jnp.bfloat16
