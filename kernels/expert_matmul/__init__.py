"""Products of rows with the weights of the experts that each row chose."""

from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.expert_matmul.reference import expert_matmul as reference

MAX_KERNEL_ROWS = 128
"""Rows that the Triton kernel takes; more are left to the reference."""


def _triton():
    from jaxspec_kernels.expert_matmul.triton_kernel import expert_matmul

    return expert_matmul


expert_matmul = Op("expert_matmul", xla=reference, triton=_triton)

__all__ = ["MAX_KERNEL_ROWS", "expert_matmul"]
