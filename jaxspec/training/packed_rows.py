"""A batch of packed conversations on the device, and attention over it without a cache."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.attention import AttentionKind
from jaxspec.attention.metadata import visible_range


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedRows:
    """Several conversations per row.

    Attributes:
      tokens: i32[B, S].
      positions: i32[B, S], each token's place in its own conversation.
      segments: i32[B, S], which conversation of the row; 0 is padding.
      answer: bool[B, S], the token is part of an answer.
    """

    tokens: jax.Array
    positions: jax.Array
    segments: jax.Array
    answer: jax.Array


def shift_left(x: jax.Array, by: int) -> jax.Array:
    """x[:, i + by] at i, [B, S, ...]; zero (or False) past the end."""
    padding = [(0, 0), (0, by), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x[:, by:], padding)


def visible_rows(kind: AttentionKind, rows: PackedRows, ahead: int = 0) -> jax.Array:
    """bool[B, S, S]: which rows (last axis) a row sees when it stands `ahead` positions past its own."""
    first, _ = visible_range(kind, rows.positions + ahead)
    position = rows.positions[:, None, :]
    same = rows.segments[:, :, None] == rows.segments[:, None, :]
    return same & (position >= first[:, :, None]) & (position <= rows.positions[:, :, None])


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    own: tuple[tuple[jax.Array, jax.Array, jax.Array], ...] = (),
) -> jax.Array:
    """Softmax attention of every row over the rows that it sees, and over keys of its own.

    Args:
      queries: [B, S, N, G, D].
      keys, values: [B, S, N, D].
      visible: bool[B, S, S]; every row sees at least itself.
      own: keys and values [B, S, N, D] that row i alone sees at i, with bool[B, S] whether it does.

    Returns:
      [B, S, N, G, D] in the dtype of `queries`; softmax in float32.
    """
    if not own and queries.dtype == jnp.bfloat16 and jax.default_backend() == "gpu":
        return _fused(queries, keys, values, visible)
    scale = queries.shape[-1] ** -0.5
    precision = "highest" if queries.dtype == jnp.float32 else None

    def einsum(equation: str, *args: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *args, precision=precision, preferred_element_type=jnp.float32)

    scores = jnp.where(visible[:, None, None], einsum("bqngd,bsnd->bngqs", queries, keys) * scale, -jnp.inf)
    own_scores = [
        jnp.where(seen[:, None, None], einsum("bqngd,bqnd->bngq", queries, k) * scale, -jnp.inf)
        for k, _, seen in own
    ]
    peak = scores.max(axis=-1)
    for column in own_scores:
        peak = jnp.maximum(peak, column)
    peak = jax.lax.stop_gradient(peak)
    weights = jnp.exp(scores - peak[..., None])
    own_weights = [jnp.exp(column - peak) for column in own_scores]
    total = weights.sum(axis=-1) + sum(own_weights)
    attended = einsum("bngqs,bsnd->bqngd", weights.astype(queries.dtype), values)
    for weight, (_, v, _) in zip(own_weights, own, strict=True):
        attended += einsum("bngq,bqnd->bqngd", weight.astype(queries.dtype), v)
    return (attended / jnp.moveaxis(total, -1, 1)[..., None]).astype(queries.dtype)


def _fused(queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> jax.Array:
    """cuDNN's attention, which keeps no scores."""
    batch, length, kv_heads, group, size = queries.shape
    attended = jax.nn.dot_product_attention(
        queries.reshape(batch, length, kv_heads * group, size),
        keys,
        values,
        mask=visible[:, None],
        implementation="cudnn",
    )
    return attended.reshape(queries.shape)
