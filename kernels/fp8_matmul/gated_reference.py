"""A gated feed-forward network in FP8, in pure JAX."""

import jax
from jaxspec_kernels.fp8_matmul.reference import fp8_matmul
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight
from jaxspec_kernels.packed_matmul.reference import gate


def gated_fp8_matmul(x: jax.Array, gate_up: CodedWeight, down: CodedWeight) -> jax.Array:
    """Rows rounded to FP8 through gate and up, SiLU, and, rounded again, through down.

    Args:
      x: [..., M].
      gate_up: [M, 2, F], gate first; `down`: [F, out axes]. Both have scales by output.

    Returns:
      [..., out axes], of the dtype of x.
    """
    return fp8_matmul(gate(fp8_matmul(x, gate_up)), down)
