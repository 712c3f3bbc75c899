"""The root-mean-square norm of rows."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.rms_norm.reference import mean_of_squares
from jaxspec_kernels.rms_norm.reference import rms_norm as reference

rms_norm = Op("rms_norm", xla=reference, numba="rms_norm.numba_kernel")

__all__ = ["mean_of_squares", "rms_norm"]
