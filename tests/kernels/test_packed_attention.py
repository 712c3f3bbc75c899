"""Packed attention and its gradients against the definition, differentiated by JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.packed_attention import SMALL
from jaxspec_kernels.packed_attention import packed_attention, packed_attention_gradients

OP = packed_attention
BOUND = {"float32": 3e-6, "bfloat16": 8e-3}

# The others differ from these in nothing that gradients depend on.
DIFFERENTIATED = [case for case in SMALL if case.name not in ("one", "one text", "window")]


def arguments(case):
    """(queries, keys, values, first)."""
    rng = np.random.default_rng(0)
    size = (case.sequences, case.length, case.kv_heads)
    shapes = ((*size, case.group, case.head_dim), (*size, case.head_dim), (*size, case.head_dim))
    arrays = (jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype) for shape in shapes)
    return *arrays, jnp.asarray(case.first())


def definition(queries, keys, values, first, column, attended):
    """Attention with one more column of the softmax, whose logits and values are given, in float32."""
    row = np.arange(first.shape[1])
    visible = (row >= first[:, :, None]) & (row <= row[:, None])
    scores = jnp.einsum("bqhgd,bshd->bqhgs", queries, keys, precision="highest") * queries.shape[-1] ** -0.5
    scores = jnp.where(visible[:, :, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([scores, column[..., None]], axis=-1), axis=-1)
    shared = jnp.einsum("bqhgs,bshd->bqhgd", weights[..., :-1], values, precision="highest")
    return shared + weights[..., -1:] * attended


def is_near(actual, expected, case):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(actual).all()
    return np.linalg.norm(actual - expected) <= BOUND[case.dtype] * max(np.linalg.norm(expected), 1e-3)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_equals_the_definition(case, implementation):
    given = arguments(case)
    scale = case.head_dim**-0.5
    attend = jax.jit(partial(OP, scale=scale, implementation=implementation))
    attended, log_total = attend(*given)
    assert attended.dtype == given[0].dtype
    assert attended.shape == given[0].shape
    wide = [x.astype(jnp.float32) for x in given[:3]]
    never = jnp.full(log_total.shape, -jnp.inf)
    sees = np.asarray(given[3]) <= np.arange(case.length)
    expected = definition(*wide, given[3], never, jnp.zeros_like(wide[0]))
    assert is_near(attended, jnp.where(sees[..., None, None, None], expected, 0), case)
    # A column of logit zero and value one takes 1 / (1 + total) of the weight.
    share = definition(
        *wide[:2], jnp.zeros_like(wide[2]), given[3], jnp.zeros_like(never), jnp.ones_like(wide[0])
    )
    assert is_near(jax.nn.sigmoid(-log_total), share[..., 0], case)


@pytest.mark.parametrize("case", DIFFERENTIATED, ids=lambda case: case.name)
def test_gradients_equal_those_of_the_definition(case, implementation):
    queries, keys, values, first = arguments(case)
    rng = np.random.default_rng(1)
    gradient, other = (
        jnp.asarray(rng.standard_normal(queries.shape, np.float32), case.dtype) for _ in range(2)
    )
    column = jnp.asarray(rng.standard_normal(queries.shape[:-1], np.float32))
    wide = [x.astype(jnp.float32) for x in (queries, keys, values, gradient, other)]
    attended, vjp = jax.vjp(lambda *x: definition(*x, first, column, wide[4]), *wide[:3])
    scale = case.head_dim**-0.5
    _, shared = OP(queries, keys, values, first, scale=scale, implementation="xla")
    found = jax.jit(partial(packed_attention_gradients, scale=scale, implementation=implementation))(
        queries,
        keys,
        values,
        first,
        jnp.logaddexp(shared, column),
        gradient,
        (wide[3] * attended).sum(axis=-1),
    )
    for actual, expected, like in zip(found, vjp(wide[3]), (queries, keys, values), strict=True):
        assert actual.dtype == like.dtype
        assert is_near(actual, expected, case)
