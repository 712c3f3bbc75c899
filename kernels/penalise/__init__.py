"""The repetition, the frequency and the presence penalty."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.penalise.reference import penalise as reference

penalise = Op("penalise", xla=reference, numba="penalise.numba_kernel")

__all__ = ["penalise"]
