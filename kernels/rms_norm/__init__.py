"""The root-mean-square norm of rows."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.rms_norm.reference import mean_of_squares
from jaxspec_kernels.rms_norm.reference import rms_norm as reference


def _numba():
    from jaxspec_kernels.rms_norm.numba_kernel import rms_norm

    return rms_norm


rms_norm = Op("rms_norm", xla=reference, numba=_numba)

__all__ = ["mean_of_squares", "rms_norm"]
