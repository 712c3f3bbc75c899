"""The root-mean-square norm of rows."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.rms_norm.reference import add_rms_norm as add_reference
from jaxspec_kernels.rms_norm.reference import mean_of_squares
from jaxspec_kernels.rms_norm.reference import rms_norm as reference

_TRITON = "rms_norm.triton_kernel"

rms_norm = Op(
    "rms_norm", xla=reference, triton=_TRITON, numba="rms_norm.numba_kernel", only_if_exact=("triton",)
)
add_rms_norm = Op("add_rms_norm", xla=add_reference, triton=_TRITON, only_if_exact=("triton",))

__all__ = ["add_rms_norm", "mean_of_squares", "rms_norm"]
