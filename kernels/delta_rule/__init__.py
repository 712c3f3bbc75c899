"""The gated delta rule: of the rows of a step, with drafts that may be rejected, and of prompts."""

from jaxspec_kernels.delta_rule import reference
from jaxspec_kernels.delta_rule.reference import DeltaRule
from jaxspec_kernels.op import Op

# The Triton kernels have not been timed beside "xla" yet.
delta_step = Op(
    "delta_step",
    xla=reference.delta_step,
    triton="delta_rule.triton_step",
    numba="delta_rule.numba_kernel",
    only_by_name=("triton",),
)
delta_scan = Op(
    "delta_scan", xla=reference.delta_scan, triton="delta_rule.triton_scan", only_by_name=("triton",)
)

__all__ = ["DeltaRule", "delta_scan", "delta_step"]
