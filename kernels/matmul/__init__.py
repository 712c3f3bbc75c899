"""The product of a few rows with a weight."""

from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.matmul.reference import matmul as reference


def _numba():
    from jaxspec_kernels.matmul.numba_kernel import matmul

    return matmul


matmul = Op("matmul", xla=reference, numba=_numba)

__all__ = ["matmul"]
