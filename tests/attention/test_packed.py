"""Attention over whole texts."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import IndexedWindow, PackedMemory
from jaxspec.attention.packed import attend


def test_attention_in_bfloat16_equals_that_in_float32():
    rng = np.random.default_rng(1)
    queries = jnp.asarray(rng.normal(size=(2, 64, 2, 3, 16)), jnp.bfloat16)
    keys, values = jnp.asarray(rng.normal(size=(2, 2, 64, 2, 16)), jnp.bfloat16)
    visible = jnp.asarray(
        np.tril(np.ones((2, 64, 64), bool)) & (rng.random((2, 64, 64)) < 0.5) | np.eye(64, dtype=bool)
    )
    wide = attend(*(x.astype(jnp.float32) for x in (queries, keys, values)), visible, scale=0.25)
    np.testing.assert_allclose(attend(queries, keys, values, visible, scale=0.25), wide, atol=0.03)


def test_draft_steps_over_an_indexed_window_are_refused():
    positions = jnp.arange(5)
    memory = PackedMemory((IndexedWindow(3),), positions[None], jnp.ones((1, 5), jnp.int32))
    rows = jnp.ones((5, 1, 3, 4))
    tables = jnp.ones((5, 2)), jnp.zeros((5, 2))
    attended, memory = memory.attend_indexed(0, rows, tables, None, scale=1.0)
    assert attended.shape == (5, 1, 1, 4)
    with pytest.raises(AssertionError, match="draft steps do not support this kind of attention"):
        memory.attend_indexed(0, rows, tables, None, scale=1.0)
