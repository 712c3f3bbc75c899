"""Temperature, min-p, top-k and top-p."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.process_logits.reference import process_logits as reference


def _numba():
    from jaxspec_kernels.process_logits.numba_kernel import process_logits

    return process_logits


def _triton():
    from jaxspec_kernels.process_logits.triton_kernel import process_logits

    return process_logits


process_logits = Op("process_logits", xla=reference, triton=_triton, numba=_numba)

__all__ = ["process_logits"]
