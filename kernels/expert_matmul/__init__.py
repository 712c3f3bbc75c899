"""Products of rows with the weights of the experts that each row chose."""

import jax
import jax.numpy as jnp
from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.expert_matmul.mxfp4_weight import BLOCK, MAX_SCALE, Mxfp4Weight, pack_mxfp4
from jaxspec_kernels.expert_matmul.reference import expert_matmul as reference

# No decode step has so many.
_TRAINING_ROWS = 1024


def takes(rows: int, dtype: jnp.dtype, weights: jax.Array | Mxfp4Weight) -> bool:
    """Whether the Triton kernels are for this product; what they are not for is left to the reference.

    Where there are several devices, so many rows with dense weights are not: training splits them, and XLA
    cannot split a kernel. Packed weights lie on one device in any case.
    """
    if dtype != jnp.bfloat16 or weights.dtype != dtype:
        return False
    return isinstance(weights, Mxfp4Weight) or rows < _TRAINING_ROWS or jax.device_count() == 1


def reads_each_expert_once(rows: int, dtype: jnp.dtype, weights: jax.Array | Mxfp4Weight) -> bool:
    """Whether the implementation that runs here reads each chosen expert where it lies, and copies none."""
    return takes(rows, dtype, weights) and expert_matmul.why_not("triton") is None


def _triton():
    from jaxspec_kernels.expert_matmul.triton_kernel import expert_matmul

    return expert_matmul


expert_matmul = Op("expert_matmul", xla=reference, triton=_triton)

__all__ = ["BLOCK", "MAX_SCALE", "Mxfp4Weight", "expert_matmul", "pack_mxfp4", "reads_each_expert_once"]
