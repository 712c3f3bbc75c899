"""Temperature, min-p, top-k and top-p."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.process_logits.reference import process_logits as reference

process_logits = Op(
    "process_logits",
    xla=reference,
    triton="process_logits.triton_kernel",
    numba="process_logits.numba_kernel",
)

__all__ = ["process_logits"]
