"""The gated delta rule: of the rows of a step, with drafts that may be rejected, and of prompts."""

from jaxspec_kernels.delta_rule import reference
from jaxspec_kernels.delta_rule.reference import DeltaRule
from jaxspec_kernels.op import Op

delta_step = Op(
    "delta_step",
    xla=reference.delta_step,
    triton="linear_recurrence.triton_step",
    numba="linear_recurrence.numba_step",
)
delta_scan = Op("delta_scan", xla=reference.delta_scan, triton="linear_recurrence.triton_scan")

__all__ = ["DeltaRule", "delta_scan", "delta_step"]
