"""Products of rows with the weights of the experts that each row chose."""

import jax
import jax.numpy as jnp
from jaxspec_kernels.expert_matmul.mxfp4_weight import BLOCK, MAX_SCALE, Mxfp4Weight, pack_mxfp4
from jaxspec_kernels.expert_matmul.packed_experts import PackedExperts, stack_experts, stack_mxfp4
from jaxspec_kernels.expert_matmul.reference import expert_matmul as reference
from jaxspec_kernels.expert_matmul.reference import gated_expert_matmul as gated_reference
from jaxspec_kernels.op import Op
from jaxspec_kernels.packed_matmul.coded_experts import CodedExperts

Weights = jax.Array | Mxfp4Weight | PackedExperts | CodedExperts


def supports(dtype: jnp.dtype, weights: Weights) -> bool:
    """Whether the Triton kernels support this product; the reference computes others."""
    return dtype == jnp.bfloat16 and weights.dtype == dtype


def reads_each_expert_once(dtype: jnp.dtype, weights: Weights) -> bool:
    """Whether the default implementation here reads each chosen expert in place, without copying it."""
    if isinstance(weights, PackedExperts):
        return dtype == weights.dtype and expert_matmul.why_not("numba") is None
    return supports(dtype, weights) and expert_matmul.why_not("triton") is None


def gates_experts(dtype: jnp.dtype, gate_up: Weights) -> bool:
    """Whether the default implementation of `gated_expert_matmul` here is a kernel."""
    is_supported = isinstance(gate_up, CodedExperts) and supports(dtype, gate_up)
    return is_supported and gated_expert_matmul.why_not("triton") is None


_TRITON = "expert_matmul.triton_kernel"

expert_matmul = Op("expert_matmul", xla=reference, triton=_TRITON, numba="expert_matmul.numba_kernel")
gated_expert_matmul = Op("gated_expert_matmul", xla=gated_reference, triton=_TRITON)

__all__ = [
    "BLOCK",
    "MAX_SCALE",
    "Mxfp4Weight",
    "PackedExperts",
    "Weights",
    "expert_matmul",
    "gated_expert_matmul",
    "gates_experts",
    "pack_mxfp4",
    "reads_each_expert_once",
    "stack_experts",
    "stack_mxfp4",
]
