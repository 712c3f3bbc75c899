"""The short causal convolution in front of a recurrent rule, one filter for each channel."""

import jax
import jax.numpy as jnp


def causal_conv(text: jax.Array, weights: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Sums over the last W inputs of every channel.

    Args:
      text: [n, H, W - 1 + C, channels], the inputs before the first row, and those of the rows.
      weights: [H, W, channels].
      bias: [H, channels], or None.

    Returns:
      [n, H, C, channels] in the dtype of `text`. Summed term by term, so that a row's sum does not depend on
      the number of rows.
    """
    width = weights.shape[1]
    length = text.shape[2] - width + 1
    terms = (
        text[:, :, j : j + length].astype(jnp.float32) * weights[:, j, None].astype(jnp.float32)
        for j in range(width)
    )
    total = sum(terms, start=jnp.float32(0))
    if bias is not None:
        total = total + bias[:, None].astype(jnp.float32)
    return total.astype(text.dtype)


def last_inputs(text: jax.Array, count: jax.Array, before: int) -> jax.Array:
    """The inputs that the row after the first `count` rows needs, [n, H, before, channels].

    Args:
      text: [n, H, before + C, channels], as in `causal_conv`.
      count: i32[n].
      before: W - 1.
    """
    last = count[:, None] + jnp.arange(before, dtype=count.dtype)
    return jnp.take_along_axis(text, last[:, None, :, None], axis=2, mode="clip")
