"""Attention over whole texts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.attention_parts.coded_cache import decode, encode

from jaxspec.attention import CompressedAttention, Entries, FullAttention, PackedMemory, SlidingWindow
from jaxspec.attention.packed import attend


def test_gradients_with_own_keys_and_sinks_equal_those_of_one_softmax():
    rng = np.random.default_rng(1)
    queries, keys, values, one, two = (
        jnp.asarray(rng.normal(size=size), jnp.float32)
        for size in ((2, 40, 2, 3, 16), *[(2, 40, 2, 16)] * 2, *[(2, 2, 40, 2, 16)] * 2)
    )
    sinks, weights = jnp.asarray(rng.normal(size=6), jnp.float32), jnp.asarray(rng.normal(size=queries.shape))
    row = np.arange(40)
    first = np.stack([row // 13 * 13, np.maximum(row - 4, 0)])
    seen = rng.random((2, 2, 40)) < 0.7
    visible = (row >= first[:, :, None]) & (row <= row[:, None])

    def in_one_softmax(queries, keys, values, own, sinks):
        def scores(keys, mask):
            every = jnp.einsum("bqhgd,bshd->bqhgs", queries, keys, precision="highest") * 0.25
            return jnp.where(mask[:, :, None, None], every, -jnp.inf)

        columns = [scores(keys, visible)]
        columns += [
            scores(k, mask[:, :, None] & np.eye(40, dtype=bool))
            for (k, _), mask in zip(own, seen, strict=True)
        ]
        columns.append(jnp.broadcast_to(sinks.reshape(2, 3, 1), (2, 40, 2, 3, 1)))
        p = jax.nn.softmax(jnp.concatenate(columns, axis=-1), axis=-1)[..., :-1]
        every = jnp.concatenate([values, *(v for _, v in own)], axis=1)
        return (jnp.einsum("bqhgs,bshd->bqhgd", p, every, precision="highest") * weights).sum()

    def ours(queries, keys, values, own, sinks):
        own = tuple((k, v, jnp.asarray(mask)) for (k, v), mask in zip(own, seen, strict=True))
        attended = attend(
            queries, keys, values, jnp.asarray(first, jnp.int32), scale=0.25, own=own, sinks=sinks
        )
        return (attended * weights).sum()

    given = (queries, keys, values, ((one[0], one[1]), (two[0], two[1])), sinks)
    (expected, theirs), (actual, mine) = (
        jax.jit(jax.value_and_grad(each, argnums=(0, 1, 2, 3, 4)))(*given) for each in (in_one_softmax, ours)
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=3e-5), mine, theirs)


def test_attention_in_bfloat16_equals_that_in_float32():
    rng = np.random.default_rng(1)
    queries = jnp.asarray(rng.normal(size=(2, 64, 2, 3, 16)), jnp.bfloat16)
    keys, values = jnp.asarray(rng.normal(size=(2, 2, 64, 2, 16)), jnp.bfloat16)
    first = jnp.asarray(np.arange(64) // 20 * 20 + np.zeros((2, 1)), jnp.int32)
    wide = attend(*(x.astype(jnp.float32) for x in (queries, keys, values)), first, scale=0.25)
    np.testing.assert_allclose(attend(queries, keys, values, first, scale=0.25), wide, atol=0.03)


def test_a_text_is_what_has_one_number_wherever_its_positions_begin():
    positions = jnp.asarray([[5, 6, 7, 4, 5, 0]])
    memory = PackedMemory((FullAttention(), SlidingWindow(2)), positions, jnp.asarray([[3, 3, 3, 1, 1, 0]]))
    assert memory._first(0, 0)[1].tolist() == [[0, 0, 0, 3, 3, 5]]
    assert memory._first(1, 0)[1].tolist() == [[0, 0, 1, 3, 3, 5]]
    assert memory._first(1, 1)[1].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_draft_steps_over_compressed_entries_are_refused():
    positions = jnp.arange(5)
    memory = PackedMemory((CompressedAttention(3, 2),), positions[None], jnp.ones((1, 5), jnp.int32))
    rows = jnp.ones((5, 4))
    entries = Entries(rows, lambda states, there, starts: (states[:, -1],))
    given = (jnp.ones((5, 3, 4)), rows, entries)
    attend = jax.jit(lambda: memory.attend_compressed(0, *given, scale=1.0, sinks=jnp.zeros(3)))
    attended, memory = attend()
    assert attended.shape == (5, 3, 4)
    with pytest.raises(AssertionError, match="draft steps do not support compressed entries"):
        memory.attend_compressed(0, *given, scale=1.0, sinks=jnp.zeros(3))


def test_keys_and_values_are_rounded_as_in_a_cache_of_another_dtype():
    positions, key = jnp.arange(5, dtype=jnp.int32), jax.random.key(3)
    projected = jax.random.normal(key, (5, 2, 4, 8))
    tables = jnp.ones((5, 4)), jnp.zeros((5, 4))
    memories = [
        PackedMemory((FullAttention(),), positions[None], jnp.ones((1, 5), jnp.int32), cache_dtype=dtype)
        for dtype in (None, jnp.dtype(jnp.float16), jnp.dtype(jnp.float8_e4m3fn))
    ]
    (exact, full), (rounded, half), (coarse, byte) = (
        jax.jit(lambda m=m: m.attend(0, projected, tables, scale=0.3))() for m in memories
    )
    for given, kept, coded in zip(full.kept[0][0], half.kept[0][0], byte.kept[0][0], strict=True):
        np.testing.assert_array_equal(kept, given.astype(jnp.float16).astype(jnp.float32))
        np.testing.assert_array_equal(coded, decode(*encode(given)))
    assert 0 < np.abs(exact - rounded).max() < 2e-3 < np.abs(exact - coarse).max() < 0.2
