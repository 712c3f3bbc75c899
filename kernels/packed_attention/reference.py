"""Packed attention in pure JAX, which stores every score."""

import jax
import jax.numpy as jnp


def packed_attention(
    queries: jax.Array, keys: jax.Array, values: jax.Array, first: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of every row of a sequence over the rows first..itself.

    Args:
      queries: [B, S, H, G, D].
      keys: [B, S, H, D].
      values: [B, S, H, V].
      first: i32[B, S], the first row that a row sees; greater than the row's own index if it sees none.
        Never falls within a sequence.
      scale: factor of the dot products.

    Returns:
      [B, S, H, G, V] in the dtype of `queries`, zeros for a row that sees nothing; and the natural logarithm
      of the sum of exp(score), f32[B, S, H, G], -inf for such a row.
    """
    scores = _scores(queries, keys, first, scale)
    log_total = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - _finite(log_total)[..., None])
    attended = _einsum("bhgqs,bshd->bqhgd", weights.astype(queries.dtype), values)
    return attended.astype(queries.dtype), jnp.moveaxis(log_total, -1, 1)


def packed_attention_gradients(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    log_total: jax.Array,
    gradient: jax.Array,
    mean: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of `packed_attention`, perhaps as a part of a softmax with other columns.

    Args:
      queries, keys, values, first, scale: see `packed_attention`.
      log_total: f32[B, S, H, G], the logarithm of the sum of exp(score) over all columns of the softmax.
      gradient: [B, S, H, G, V], the gradient with respect to what is attended over all columns.
      mean: f32[B, S, H, G], the dot product of `gradient` and what is attended over all columns.

    Returns:
      The gradients with respect to `queries`, `keys` and `values`, with their shapes and dtypes.
    """
    by_head = jnp.moveaxis(_finite(log_total), 1, -1)[..., None]
    weights = jnp.exp(_scores(queries, keys, first, scale) - by_head)
    rise = _einsum("bqhgd,bshd->bhgqs", gradient, values) - jnp.moveaxis(mean, 1, -1)[..., None]
    scores = (weights * rise * scale).astype(queries.dtype)
    return (
        _einsum("bhgqs,bshd->bqhgd", scores, keys).astype(queries.dtype),
        _einsum("bhgqs,bqhgd->bshd", scores, queries).astype(keys.dtype),
        _einsum("bhgqs,bqhgd->bshd", weights.astype(queries.dtype), gradient).astype(values.dtype),
    )


def _scores(queries: jax.Array, keys: jax.Array, first: jax.Array, scale: float) -> jax.Array:
    """f32[B, H, G, S, S], -inf where a row sees no other."""
    row = jnp.arange(first.shape[1])
    visible = (row >= first[:, :, None]) & (row <= row[:, None])
    return jnp.where(visible[:, None, None], _einsum("bqhgd,bshd->bhgqs", queries, keys) * scale, -jnp.inf)


def _finite(log_total: jax.Array) -> jax.Array:
    """Zero for a row that sees nothing, because -inf - -inf is NaN."""
    return jnp.where(jnp.isneginf(log_total), 0.0, log_total)


def _einsum(equation: str, *args: jax.Array) -> jax.Array:
    precision = "highest" if args[0].dtype == jnp.float32 else None
    return jnp.einsum(equation, *args, precision=precision, preferred_element_type=jnp.float32)
