"""A root-mean-square norm and the product that reads it."""

from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.rms_matmul import reference


def _triton():
    from jaxspec_kernels.rms_matmul.triton_kernel import rms_matmul

    return rms_matmul


rms_matmul = Op("rms_matmul", xla=reference.rms_matmul, triton=_triton)

__all__ = ["rms_matmul"]
