"""Products of rows with the weights of the experts that each row chose."""

import jax.numpy as jnp
from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.expert_matmul.reference import expert_matmul as reference

MAX_KERNEL_ROWS = 128


def takes(rows: int, dtype: jnp.dtype) -> bool:
    """Whether the Triton kernel is for so many rows; what it is not for is left to the reference."""
    return rows <= MAX_KERNEL_ROWS and dtype == jnp.bfloat16


def reads_each_expert_once(rows: int, dtype: jnp.dtype) -> bool:
    """Whether the implementation that runs here reads each chosen expert once, and copies none."""
    return takes(rows, dtype) and expert_matmul.why_not("triton") is None


def _triton():
    from jaxspec_kernels.expert_matmul.triton_kernel import expert_matmul

    return expert_matmul


expert_matmul = Op("expert_matmul", xla=reference, triton=_triton)

__all__ = ["expert_matmul", "reads_each_expert_once"]
