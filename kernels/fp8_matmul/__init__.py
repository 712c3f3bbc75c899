"""Products of many rows in FP8 with weights in FP8."""

from jaxspec_kernels.fp8_matmul.gated_reference import gated_fp8_matmul as gated_reference
from jaxspec_kernels.fp8_matmul.reference import fp8_matmul as reference
from jaxspec_kernels.fp8_matmul.reference import has_output_scales, reads, runs_here
from jaxspec_kernels.op import Op

fp8_matmul = Op("fp8_matmul", xla=reference, triton="fp8_matmul.triton_kernel")
gated_fp8_matmul = Op("gated_fp8_matmul", xla=gated_reference, triton="fp8_matmul.triton_gated")

__all__ = ["fp8_matmul", "gated_fp8_matmul", "has_output_scales", "reads", "runs_here"]
