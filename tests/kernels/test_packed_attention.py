"""Packed attention and its gradients against the definition, differentiated by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from bench.kernel_cases.packed_attention import SMALL
from jaxspec_kernels.packed_attention import packed_attention, packed_attention_gradients
from op_base import OpTest

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


@jax.jit
def definition(queries, keys, values, first, column, attended):
    """Attention with one more column of the softmax, whose logits and values are given, in float32."""
    row = np.arange(first.shape[1])
    visible = (row >= first[:, :, None]) & (row <= row[:, None])
    scores = jnp.einsum("bqhgd,bshd->bqhgs", queries, keys, precision="highest") * queries.shape[-1] ** -0.5
    scores = jnp.where(visible[:, :, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([scores, column[..., None]], axis=-1), axis=-1)
    shared = jnp.einsum("bqhgs,bshd->bqhgd", weights[..., :-1], values, precision="highest")
    return shared + weights[..., -1:] * attended


@jax.jit
def gradients(arrays, first, column, attended, gradient):
    """Of the definition, by JAX."""
    _, vjp = jax.vjp(lambda *arrays: definition(*arrays, first, column, attended), *arrays)
    return vjp(gradient)


class PackedTest(OpTest):
    usual = ("odd sizes",)
    exact = ()

    def options(self, case):
        return {"scale": case.head_dim**-0.5}


class TestPackedAttention(PackedTest):
    op = packed_attention
    cases = SMALL
    bound = BOUND
    by_row = (0, 1, 2, 3)

    def arguments(self, case):
        return arguments(case)

    def definition(self, case, queries, keys, values, first):
        queries, keys, values = (np.asarray(x, np.float64) for x in (queries, keys, values))
        row = np.arange(first.shape[1])
        visible = (row >= np.asarray(first)[:, :, None]) & (row <= row[:, None])
        scores = np.einsum("bqhgd,bshd->bqhgs", queries, keys) * case.head_dim**-0.5
        weights = np.where(visible[:, :, None, None], np.exp(scores), 0)
        total = weights.sum(axis=-1)
        attended = np.einsum("bqhgs,bshd->bqhgd", weights, values) / np.where(total, total, 1)[..., None]
        return attended, np.log(total, where=total > 0, out=np.full_like(total, -np.inf)).astype(np.float32)


class TestPackedAttentionGradients(PackedTest):
    op = packed_attention_gradients
    cases = DIFFERENTIATED
    bound = BOUND
    smallest = 1e-3
    by_row = (0, 1, 2, 3, 4, 5, 6)

    def arguments(self, case):
        """The gradient with respect to what is attended with one more column."""
        queries, keys, values, first = arguments(case)
        gradient, wide, column, other = self.beside(case)
        attended = definition(*(x.astype(jnp.float32) for x in (queries, keys, values)), first, column, other)
        _, shared = TestPackedAttention().run(case, (queries, keys, values, first), "xla")
        mean = (wide * attended).sum(axis=-1)
        return queries, keys, values, first, jnp.logaddexp(shared, column), gradient, mean

    def beside(self, case):
        """The gradient of what is attended, as it is and in float32; the other column's logits and values."""
        rng, shape = np.random.default_rng(1), arguments(case)[0].shape
        gradient, other = (jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype) for _ in range(2))
        column = jnp.asarray(rng.standard_normal(shape[:-1], np.float32))
        return gradient, gradient.astype(jnp.float32), column, other.astype(jnp.float32)

    def definition(self, case, queries, keys, values, first, log_total, gradient, mean):
        """By JAX, in float32."""
        _, wide, column, other = self.beside(case)
        arrays = [x.astype(jnp.float32) for x in (queries, keys, values)]
        return [np.asarray(x, np.float64) for x in gradients(arrays, first, column, other, wide)]
