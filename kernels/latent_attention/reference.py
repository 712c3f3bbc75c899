"""Latent attention in pure JAX: the loop of `paged_attention` over a cache with one vector per position."""

import jax
from jaxspec_kernels.paged_attention.reference import attend


def latent_attention(
    queries: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    value_dim: int,
    scale: float,
) -> jax.Array:
    """Softmax attention of every query row over the positions first..last of its slot.

    All heads share one vector per position: the latent, followed by the rotated part of the key. The whole
    vector is the key, and its first elements are the value. The up projections to keys and values are applied
    to the queries and to the result instead (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

    Args:
      queries: [B, Q, G, D].
      cache: [pages, 1, 1, P, D].
      page_table: i32[B, T], the page that holds positions i*P..i*P+P-1 of the slot.
      first: i32[B, Q], the first position that a row sees.
      last: i32[B, Q], the last one, inclusive; less than `first` for a row that sees nothing.
      value_dim: how many elements of the vector are the value.
      scale: factor of the dot products.

    Returns:
      [B, Q, G, value_dim] in the dtype of `queries`; zeros for a row that sees nothing. Positions outside
      first..last have no effect, even if the cache holds NaN there.
    """
    return attend(queries, cache, page_table, first, last, value_dim=value_dim, scale=scale)
