"""A paged cache of keys and values in 8 bits (`engine.cache_dtype = "float8_e4m3fn"`): codes, and a power of
two for every row of a head.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.narrow import narrow

MOST_MANTISSA = 0x600000
"""The mantissa of 1.75, that of the largest number of float8_e4m3fn: 448 = 1.75 * 2 ** 8."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CodedCache:
    """Keys and values are code * 2 ** (exponent - 127), which is exact in float32 and in bfloat16.

    Every row has a scale of its own, which only its own numbers determine. So a row never changes when others
    are written beside it: not when a page fills, nor when rejected drafts are written over. A power of two
    fits in a byte and rounds nothing.

    Attributes:
      codes: float8_e4m3fn[pages, H, 2, P, D].
      exponents: u8[pages, H, 2, P], those of float32; 0 stands for a scale of zero.
    """

    codes: jax.Array
    exponents: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.codes.dtype


Cache = jax.Array | CodedCache
"""A cache of keys and values [pages, H, 2, P, D]."""


def encode(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The codes float8_e4m3fn[..., D] and exponents u8[...] of rows [..., D].

    The scale is the smallest with which the largest magnitude is at most 448. An element that is no number or
    infinite becomes NaN, and the others of its row are as if it were zero.
    """
    rows = rows.astype(jnp.float32)
    is_finite = jnp.isfinite(rows)
    largest = jnp.max(jnp.abs(jnp.where(is_finite, rows, 0.0)), axis=-1)
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > MOST_MANTISSA)
    exponent = jnp.maximum(exponent, 1)
    inverse = lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)
    codes = jnp.where(is_finite, rows * inverse[..., None], jnp.nan)
    return narrow(codes, jnp.float8_e4m3fn), exponent.astype(jnp.uint8)


def decode(codes: jax.Array, exponents: jax.Array) -> jax.Array:
    """The rows f32[..., D] of what `encode` returns."""
    scale = lax.bitcast_convert_type(exponents.astype(jnp.int32) << 23, jnp.float32)
    return codes.astype(jnp.float32) * scale[..., None]
