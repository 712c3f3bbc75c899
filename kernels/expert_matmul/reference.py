"""Products with chosen experts in pure JAX."""

import jax
import jax.numpy as jnp
from jaxspec_kernels.expert_matmul.mxfp4_weight import Mxfp4Weight
from jaxspec_kernels.expert_matmul.packed_experts import PackedExperts
from jaxspec_kernels.matmul.reference import round_rows
from jaxspec_kernels.packed_matmul.coded_experts import CodedExperts
from jaxspec_kernels.packed_matmul.reference import gate


def expert_matmul(
    x: jax.Array, experts: jax.Array, weights: jax.Array | Mxfp4Weight | PackedExperts | CodedExperts
) -> jax.Array:
    """x[a // n] @ weights[experts[a]] for every a.

    Args:
      x: [A / n, M]: n consecutive entries of `experts` are those of one row.
      experts: i32[A], each in 0..E-1.
      weights: [E, M, out axes]; packed ones are dequantized, and x is rounded if the `activations` of
        `PackedExperts` say so.

    Returns:
      f32[A, out axes]. This reference copies the weights of every row's expert.
    """
    if isinstance(weights, PackedExperts) and weights.stack.activations == "int8":
        x = round_rows(x, weights.stack.row_block)
    if isinstance(weights, Mxfp4Weight | PackedExperts | CodedExperts):
        weights = weights.dense()
        x = x.astype(weights.dtype)
    columns = weights.reshape(*weights.shape[:2], -1)
    y = jnp.einsum(
        "am,amn->an",
        repeat_rows(x, len(experts)),
        columns[experts],
        # Without "highest" a GPU rounds float32 operands to TF32, which can change greedy tokens.
        precision="highest" if weights.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return y.reshape(len(experts), *weights.shape[2:])


def gated_expert_matmul(
    x: jax.Array, experts: jax.Array, gate_up: jax.Array | Mxfp4Weight | PackedExperts | CodedExperts
) -> jax.Array:
    """SiLU of gates times ups, where both are products as of `expert_matmul`.

    Args:
      x, experts: see `expert_matmul`.
      gate_up: [E, M, 2, F], gate first.

    Returns:
      [A, F], of the dtype of x.
    """
    return gate(expert_matmul(x, experts, gate_up)).astype(x.dtype)


def repeat_rows(x: jax.Array, count: int) -> jax.Array:
    """Every row as often as makes `count` rows, side by side."""
    return x if len(x) == count else jnp.repeat(x, count // len(x), axis=0)
