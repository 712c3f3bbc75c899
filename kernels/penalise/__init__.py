"""The repetition, the frequency and the presence penalty."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.penalise.reference import penalise as reference


def _numba():
    from jaxspec_kernels.penalise.numba_kernel import penalise

    return penalise


penalise = Op("penalise", xla=reference, numba=_numba)

__all__ = ["penalise"]
