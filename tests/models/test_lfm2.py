"""LFM2's convolutions row by row, and published files; test_small_families.py has the goldens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.config import ModelConfig
from jaxspec.models.families.lfm2 import ConvRule
from jaxspec.models.target import make_target
from jaxspec.weights.loading import declared


@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_chunk_is_its_rows_one_after_another(length):
    """Also with rows of padding, which are NaN, and where a text is shorter than a state."""
    rule, rng = _rule(), np.random.default_rng(length)
    (state,) = states = (_normal(rng, 2, 2, 3, 5),)
    rows = _normal(rng, 2, length, 2, 5)
    counts = np.array([length, max(length - 3, 0)])
    valid = np.arange(length) < counts[:, None]
    outputs, (after,) = rule.chunk(
        states, jnp.where(valid[..., None, None], rows, jnp.nan), jnp.asarray(valid)
    )
    for text, count in enumerate(counts):
        one = (state[text : text + 1],)
        for i in range(count):
            output, one = rule.step(one, rows[text : text + 1, i])
            np.testing.assert_allclose(outputs[text, i], output[0], rtol=1e-6)
        np.testing.assert_array_equal(after[text], one[0][0])


def test_a_row_of_a_step_does_not_depend_on_those_beside_it():
    rule, rng = _rule(), np.random.default_rng(0)
    states, rows = (_normal(rng, 5, 2, 3, 5),), _normal(rng, 5, 2, 5)
    step = jax.jit(rule.step)
    together, alone = step(states, rows), step((states[0][3:4],), rows[3:4])
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(one[3], other[0])


def _rule():
    rng = np.random.default_rng(9)
    return ConvRule(_normal(rng, 2, 4, 5), _normal(rng, 2, 5))


def _normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def test_a_published_file_of_one_billion_parameters():
    """It states widths before they are adjusted, and the layers that attend."""
    config = ModelConfig.from_hf(
        {
            "model_type": "lfm2",
            "block_auto_adjust_ff_dim": True,
            "block_ff_dim": 12288,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "conv_L_cache": 3,
            "conv_bias": False,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "hidden_size": 2048,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-5,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rope_theta": 1000000.0,
            "vocab_size": 65536,
        }
    )
    assert (config.intermediate_size, config.rms_norm_eps, config.rope.theta) == (8192, 1e-5, 1e6)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [
        *(2, 5, 8, 10, 12, 14)
    ]
    target = nnx.eval_shape(lambda: make_target(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    count = sum(variable.get_value().size for variable, _ in declared(target))
    assert count == pytest.approx(1.17e9, rel=1e-2)
