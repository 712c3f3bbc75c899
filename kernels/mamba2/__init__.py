"""Mamba-2: of the rows of a step, with drafts that may be rejected, and of prompts."""

from jaxspec_kernels.mamba2 import reference
from jaxspec_kernels.mamba2.reference import Mamba2Rule
from jaxspec_kernels.op import Op

mamba_step = Op(
    "mamba_step",
    xla=reference.mamba_step,
    triton="linear_recurrence.triton_step",
    numba="linear_recurrence.numba_step",
)
mamba_scan = Op("mamba_scan", xla=reference.mamba_scan, triton="linear_recurrence.triton_scan")

__all__ = ["Mamba2Rule", "mamba_scan", "mamba_step"]
