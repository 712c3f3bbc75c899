"""Experts in MXFP4, as checkpoints store them: four-bit floats in blocks of 32 that share an exponent.

Source: OCP Microscaling Formats (MX) 1.0, 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxspec_kernels.packed_array import PackedArray

BLOCK = 32
"""Inputs that share an exponent."""
MAX_SCALE = 128
"""The largest supported exponent, a factor of 2: the most that one product in `mxfp4_ptx.py` can express."""

_VALUES = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scale"), meta_fields=())
@dataclass(frozen=True)
class Mxfp4Weight(PackedArray):
    """Weights [E, M, out axes] of experts; every weight is exact in bfloat16.

    Attributes:
      values: u16[E, out axes, M / 4]. Input 4j + i is in the four bits i, counted from the lowest, of word j.
      scale: u8[E, M / BLOCK, out axes]; a weight is its value times 2 ** (scale - 127).
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        count, *outputs, words = self.values.shape
        return count, 4 * words, *outputs

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(jnp.bfloat16)

    def dense(self) -> jax.Array:
        """The weights as bfloat16, of `shape`."""
        codes = self.values[..., None] >> jnp.arange(0, 16, 4, dtype=jnp.uint16) & jnp.uint16(15)
        # The scale is split over two factors, so that neither is subnormal: XLA may flush those to zero.
        values = jnp.asarray(_VALUES * 2.0**-64)[codes].reshape(*self.values.shape[:-1], -1)
        factor = jax.lax.bitcast_convert_type((self.scale.astype(jnp.int32) + 64) << 23, jnp.float32)
        weights = jnp.moveaxis(values, -1, 1) * jnp.repeat(factor, BLOCK, axis=1)
        return weights.astype(jnp.bfloat16)


def pack_mxfp4(values: np.ndarray, scale: np.ndarray) -> Mxfp4Weight:
    """A packed weight, on the host.

    Args:
      values: u8[E, M / 2, out axes], two inputs per byte, the first in the lower four bits.
      scale: u8[E, M / BLOCK, out axes], none above MAX_SCALE.

    Raises:
      ValueError: the shapes do not fit, or a scale is too large.
    """
    count, blocks, *outputs = scale.shape
    if values.shape != (count, blocks * BLOCK // 2, *outputs):
        raise ValueError(f"MXFP4 values of shape {values.shape} do not fit scales of shape {scale.shape}")
    if scale.max(initial=0) > MAX_SCALE:
        raise ValueError(f"an MXFP4 scale is {scale.max()}; the largest that stays packed is {MAX_SCALE}")
    words = np.ascontiguousarray(np.moveaxis(values, 1, -1)).view("<u2")
    return Mxfp4Weight(words, np.ascontiguousarray(scale))  # type: ignore[arg-type]
