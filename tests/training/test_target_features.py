"""The forward pass over packed rows against the network's own, over the paged cache."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxspec.training.target_features import target_features

from jaxspec.attention import build_metadata, init_cache
from jaxspec.config import ModelConfig
from jaxspec.models.llama import Llama
from jaxspec.sharding import make_mesh
from jaxspec.training.packed_rows import PackedRows, attend

PLAIN = ModelConfig("llama", 40, 32, 48, 3, 4, 2, 8, tie_word_embeddings=True)
SLIDING = replace(
    PLAIN, layer_types=("sliding_attention", "full_attention", "sliding_attention"), sliding_window=5
)
CAPTURE = (0, 1, 3)


@pytest.mark.parametrize("config", [PLAIN, replace(PLAIN, qk_norm=True, attention_bias=True), SLIDING])
def test_packed_rows_get_the_networks_own_hidden_states(config):
    target = Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    lengths = (11, 7)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (1, 20)), jnp.int32)
    positions = np.concatenate([*(np.arange(n) for n in lengths), np.zeros(2)]).astype(np.int32)[None]
    segments = np.repeat([1, 2, 0], [*lengths, 2])[None]
    hidden, captured = target_features(target, PackedRows(tokens, positions, segments, segments > 0), CAPTURE)
    begin = 0
    for length in lengths:
        place = slice(begin, begin + length)
        begin += length
        table = jnp.arange(1, 4, dtype=jnp.int32)[None]
        alone = jnp.arange(length, dtype=jnp.int32)[None]
        metadata = build_metadata(target.kinds, alone, alone >= 0, table, page_size=4)
        cache = init_cache(target.cache_shapes, num_pages=4, page_size=4, dtype=jnp.float32, mesh=make_mesh())
        own, own_captured, _ = target(tokens[:, place], alone, cache, metadata, capture=CAPTURE)
        np.testing.assert_allclose(hidden[:, place], own, atol=2e-5)
        for packed, expected in zip(captured, own_captured, strict=True):
            np.testing.assert_allclose(packed[:, place], expected, atol=2e-5)


def test_attention_in_bfloat16_equals_that_in_float32():
    rng = np.random.default_rng(1)
    queries = jnp.asarray(rng.normal(size=(2, 64, 2, 3, 16)), jnp.bfloat16)
    keys, values = jnp.asarray(rng.normal(size=(2, 2, 64, 2, 16)), jnp.bfloat16)
    visible = jnp.asarray(
        np.tril(np.ones((2, 64, 64), bool)) & (rng.random((2, 64, 64)) < 0.5) | np.eye(64, dtype=bool)
    )
    wide = attend(*(x.astype(jnp.float32) for x in (queries, keys, values)), visible)
    np.testing.assert_allclose(attend(queries, keys, values, visible), wide, atol=0.03)
