"""Packed weights of every form, for tests."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxspec_kernels.expert_matmul import PackedExperts, stack_experts
from jaxspec_kernels.matmul import PackedWeight, pack

WIDTH, OUTPUTS = 576, 530
FORMS = {
    "bfloat16": None,
    # Values, inputs to a block, bits of a scale or of its unit, whether there is an offset, scales to a unit.
    "Q8_0": ("int8", 32, 11, False, 0),
    "Q4_1": ("uint8", 32, 11, True, 0),
    "Q4_K": ("uint8", 32, 11, True, 6),
    "Q5_K": ("int6", 32, 11, True, 3),
    "Q6_K": ("int6", 16, 11, False, 12),
    "integers of 8 bits": ("int8", 16, 11, False, 12),
    "Q5_K and Q8_0": ("int8", 32, 17, True, 0),
    "MXFP4": ("mxfp4", 32, 0, False, 0),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def experts(form: str, activations: str) -> tuple[PackedExperts, np.ndarray]:
    """Three packed experts of axes [WIDTH, 2, OUTPUTS / 2], and their values f32[3, WIDTH, OUTPUTS]."""
    packed, values = zip(*(weight(form, seed, activations=activations) for seed in range(3)), strict=True)
    host = [jax.tree.map(np.asarray, each).reshape(WIDTH, 2, -1) for each in packed]
    return jax.tree.map(jnp.asarray, stack_experts(host)), np.stack(values)


def weight(form: str, seed: int = 0, **settings: Any) -> tuple[PackedWeight, np.ndarray]:
    """A packed weight, and its values by the formula, float32."""
    rng = np.random.default_rng(seed)
    size = (WIDTH, OUTPUTS)
    if FORMS[form] is None:
        values = rng.standard_normal(size, np.float32).astype(ml_dtypes.bfloat16)
        return jax.tree.map(jnp.asarray, pack(values.T, None, None, size, **settings)), values.astype(
            np.float32
        )
    kind, block, bits, has_offset, per_unit = FORMS[form]
    if kind == "mxfp4":
        codes = rng.integers(0, 16, size, np.uint8)
        exponents = rng.integers(115, 125, (WIDTH // block, OUTPUTS), np.uint8)
        exponents[3] = 0
        packed = jax.tree.map(jnp.asarray, pack(codes.T, exponents.T, None, size, **settings))
        # Of half a unit; the exponent 0 stands for no weight.
        factors = np.where(exponents == 0, 0, np.ldexp(np.float32(2), exponents.astype(int) - 127))
        return packed, (E2M1[codes] * np.repeat(factors, block, axis=0)).astype(np.float32)

    def floats(inputs: int) -> np.ndarray:
        exact = rng.standard_normal((WIDTH // inputs, OUTPUTS), np.float32)
        return ((exact.view(np.uint32) >> 24 - bits) << 24 - bits).view(np.float32)

    stored: list[np.ndarray | None] = []  # factors and their units
    factors: list[np.ndarray] = []
    for _ in range(1 + has_offset):
        if not per_unit:
            stored += [floats(block), None]
            factors.append(stored[-2])
            continue
        units, small = floats(block * per_unit), rng.integers(-32, 64, (WIDTH // block, OUTPUTS), np.int8)
        stored += [small, units]
        factors.append(small * np.repeat(units, per_unit, axis=0))
    scale, scale_unit, offset, offset_unit = (*(a if a is None else a.T for a in stored), None, None)[:4]
    limits = {"uint8": (0, 16), "int6": (-32, 32), "int8": (-128, 128)}[kind]
    integers = rng.integers(*limits, size).astype(np.uint8 if kind == "uint8" else np.int8)
    host = pack(integers.T, scale, offset, size, scale_unit=scale_unit, offset_unit=offset_unit, **settings)
    values = np.repeat(factors[0], block, axis=0) * integers.astype(np.float32)
    if has_offset:
        values = values + np.repeat(factors[1], block, axis=0)
    return jax.tree.map(jnp.asarray, host), values


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """Rows as they are multiplied where activations are "int8", by the formula: float64."""
    blocks = x.reshape(len(x), -1, block)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.float32(127) / largest
    return (np.rint(blocks * inverse) * (largest / np.float32(127)).astype(np.float64)).reshape(x.shape)
