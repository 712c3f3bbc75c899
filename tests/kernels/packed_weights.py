"""Packed weights of every form, for tests."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxspec_kernels.matmul import PackedWeight, pack

WIDTH, OUTPUTS = 576, 530
FORMS = {
    "bfloat16": None,
    # Values, inputs to a block, bits of a scale, whether there is an offset.
    "Q8_0": ("int8", 32, 11, False),
    "Q4_1": ("uint8", 32, 11, True),
    "Q4_K": ("uint8", 32, 17, True),
    "Q5_K": ("int8", 32, 17, True),
    "Q6_K": ("int8", 16, 17, False),
}


def weight(form: str, **settings: str) -> tuple[PackedWeight, np.ndarray]:
    """A packed weight, and its values by the formula, float32."""
    rng = np.random.default_rng(0)
    size = (WIDTH, OUTPUTS)
    if FORMS[form] is None:
        values = rng.standard_normal(size, np.float32).astype(ml_dtypes.bfloat16)
        return jax.tree.map(jnp.asarray, pack(values, None, None, size)), values.astype(np.float32)
    kind, block, bits, has_offset = FORMS[form]

    def factors() -> np.ndarray:
        exact = rng.standard_normal((WIDTH // block, OUTPUTS), np.float32)
        return ((exact.view(np.uint32) >> 24 - bits) << 24 - bits).view(np.float32)

    scale, offset = factors(), factors() if has_offset else None
    integers = rng.integers(*((0, 16) if kind == "uint8" else (-128, 128)), size).astype(kind)
    packed = jax.tree.map(jnp.asarray, pack(integers, scale, offset, size, **settings))
    values = np.repeat(scale, block, axis=0) * integers.astype(np.float32)
    if offset is not None:
        values = values + np.repeat(offset, block, axis=0)
    return packed, values
