"""Linear recurrences, by the gated delta rule or by Mamba-2: of the rows of a step, with drafts that may be
rejected, and of prompts."""

from jaxspec_kernels.linear_recurrence import reference
from jaxspec_kernels.linear_recurrence.rules import DeltaRule, Mamba2Rule
from jaxspec_kernels.op import Op

recurrence_step = Op(
    "recurrence_step",
    xla=reference.recurrence_step,
    triton="linear_recurrence.triton_step",
    numba="linear_recurrence.numba_step",
)
recurrence_scan = Op("recurrence_scan", xla=reference.recurrence_scan, triton="linear_recurrence.triton_scan")

__all__ = ["DeltaRule", "Mamba2Rule", "recurrence_scan", "recurrence_step"]
