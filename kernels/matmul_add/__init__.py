"""A product added to a residual."""

from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.matmul_add import reference


def _triton():
    from jaxspec_kernels.matmul_add.triton_kernel import matmul_add

    return matmul_add


matmul_add = Op("matmul_add", xla=reference.matmul_add, triton=_triton)

__all__ = ["matmul_add"]
