"""Gemma 3 against transformers: four norms a layer, two ropes, the scaled embedding, nested checkpoints."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close, golden_checkpoint, golden_outputs
from paged_rows import PagedTarget
from target_checks import check_export, check_one_pass, check_pieces

from jaxspec.models.target import load_target

CASES = ("gemma3", "gemma3-default-rope", "gemma3-typed-rope")


@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize("size", [1, 5])
def test_pieces_through_the_cache_equal_one_pass(size):
    check_pieces("gemma3", size)


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_every_tensor(case):
    check_export(case)


@pytest.mark.parametrize(
    "change", [{"query_pre_attn_scalar": 16}, {"sliding_window": 8}, {"rope_parameters": None}]
)
def test_every_part_shows_in_the_goldens(change):
    """What the goldens would not notice, they would not test."""
    checkpoint, golden = golden_checkpoint("gemma3"), golden_outputs("gemma3")
    model = load_target(replace(checkpoint, config={**checkpoint.config, **change}), dtype=jnp.float32)
    ids = golden["input_ids"].astype(np.int32)
    logits, _, _ = PagedTarget(model, *ids.shape, page_size=16, width=48).feed(ids, [0, 0])
    assert np.abs(np.asarray(logits) - golden["logits"]).max() > 1e-2 * np.abs(golden["logits"]).max()


def test_heads_share_the_embedding_as_it_is_stored():
    checkpoint = golden_checkpoint("gemma3")
    model = load_target(checkpoint, dtype=jnp.float32)
    table = checkpoint.tensors["model.embed_tokens.weight"].read()
    tokens = jnp.asarray([[3, 7]])
    np.testing.assert_array_equal(np.asarray(model.embedding(tokens))[0], table[[3, 7]])
    assert_close(model.embed(tokens)[0], table[[3, 7]] * np.float32(32**0.5), relative=1e-6)
