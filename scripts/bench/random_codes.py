"""Random weights in codes."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.packed_matmul import CodedExperts, CodedWeight, block_words, tile_outputs


def random_codes(
    key: jax.Array,
    shape: tuple[int, ...],
    bits: int,
    *,
    inner: int = 1,
    group: int = 128,
    scale_rows: int = 1,
    has_zero: bool = False,
    is_int8: bool = False,
    activations: str | None = None,
) -> CodedWeight:
    """Random weights, scaled so that outputs are about as large as inputs.

    Args:
      key: of the random numbers.
      shape: axes of inputs, then of outputs.
      bits: 8 for FP8 or int8, or 4.
      inner: the number of axes of inputs.
      group: inputs that share a scale; 0 for all.
      scale_rows: outputs that share a scale.
      has_zero: whether there are zero points.
      is_int8: whether codes of eight bits are int8.
      activations: see `CodedWeight`.
    """
    width, (*first, last) = math.prod(shape[:inner]), shape[inner:]
    group = group or width
    blocks = block_words(width, bits, group, is_int8=is_int8)
    assert blocks is not None, "no kernel reads such a weight"
    codes, scales = jax.random.split(key)
    is_fp8 = bits == 8 and not is_int8
    tile = tile_outputs(last, width // group, is_fp8=is_fp8)
    steps = width * bits // 16 // blocks
    stored_codes = jax.random.bits(codes, (*first, last // tile, steps, tile, 2 * blocks), jnp.uint8)
    if is_fp8:
        stored_codes &= 0xBF  # no code above 1.875, and none of NaN
    elif bits == 4:
        # Codes of 1 to 15: with 0 as well, their mean would not be 8, all rows of a network would soon be
        # alike, and they would choose the same experts.
        stored_codes |= (stored_codes & 0x0F == 0).astype(jnp.uint8) << 3
        stored_codes |= (stored_codes & 0xF0 == 0).astype(jnp.uint8) << 7
    scale = jax.random.uniform(scales, (width // group, *first, last // scale_rows), jnp.float32, 0.5, 2.0)
    scale = scale * (width**-0.5 / (74.0 if is_int8 else 0.5 if bits == 8 else 4.6))
    stored = lax.bitcast_convert_type(scale, jnp.uint32)
    if has_zero:
        stored = stored & jnp.uint32(0xFFFFFFE0) | jnp.uint32(8)
    return CodedWeight(
        stored_codes, stored, None, shape[1:inner], has_zero, bits, activations, is_int8=is_int8
    )


def random_coded_experts(
    key: jax.Array,
    shape: tuple[int, ...],
    bits: int,
    *,
    group: int = 128,
    scale_rows: int = 1,
    has_zero: bool = False,
) -> CodedExperts:
    """`random_codes` for experts [E, M, out axes]."""
    count, width, *outputs = shape
    flat = random_codes(
        key, (width, count, *outputs), bits, group=group, scale_rows=scale_rows, has_zero=has_zero
    )
    return CodedExperts(flat.codes, jnp.moveaxis(flat.scale, 1, 0), has_zero, bits)
