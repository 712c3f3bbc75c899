"""GPT-OSS against transformers: sinks, windows, clamped experts, ties, YaRN without rounding, MXFP4."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_checkpoint, golden_outputs
from paged_rows import PagedTarget
from target_checks import check_export, check_one_pass, check_pieces

from jaxspec.models.target import load_target


@pytest.mark.parametrize("case", ["gpt-oss", "gpt-oss-mxfp4"])
def test_one_pass_equals_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize("size", [1, 5])
def test_pieces_through_the_cache_equal_one_pass(size):
    check_pieces("gpt-oss", size)


@pytest.mark.parametrize("case", ["gpt-oss", "gpt-oss-mxfp4"])
def test_export_gives_back_every_tensor(case):
    check_export(case)


@pytest.mark.parametrize("change", ["sinks", "window", "clamp", "router_bias"])
def test_every_part_shows_in_the_goldens(change):
    """What the goldens would not notice, they would not test."""
    checkpoint, golden = golden_checkpoint("gpt-oss"), golden_outputs("gpt-oss")
    if change == "window":
        checkpoint = replace(checkpoint, config={**checkpoint.config, "sliding_window": 8})
    if change == "clamp":
        checkpoint = replace(checkpoint, config={**checkpoint.config, "swiglu_limit": 9.0})
    model = load_target(checkpoint, dtype=jnp.float32)
    for layer in model.layers:
        bias = {"sinks": layer.attention.sinks, "router_bias": layer.mlp.router.bias}.get(change)
        if bias is not None:
            bias.set_value(jnp.zeros_like(bias.get_value()))
    ids = golden["input_ids"].astype(np.int32)
    logits, _, _ = PagedTarget(model, *ids.shape, page_size=16, width=48).feed(ids, [0, 0])
    assert np.abs(np.asarray(logits) - golden["logits"]).max() > 1e-2 * np.abs(golden["logits"]).max()


def test_layer_zero_is_the_first_with_a_window():
    config = {k: v for k, v in golden_checkpoint("gpt-oss").config.items() if k != "layer_types"}
    model = load_target(replace(golden_checkpoint("gpt-oss"), config=config), dtype=jnp.float32)
    assert model.config.layer_types == ("sliding_attention", "full_attention", "sliding_attention")
