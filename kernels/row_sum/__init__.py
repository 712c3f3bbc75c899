"""The sum over the last axis, and its logarithm."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.row_sum.reference import row_log, sum_in_order
from jaxspec_kernels.row_sum.reference import row_sum as reference

row_sum = Op(
    "row_sum",
    xla=reference,
    triton="row_sum.triton_kernel",
    numba="row_sum.numba_kernel",
    only_if_exact=("triton",),
)

__all__ = ["row_log", "row_sum", "sum_in_order"]
