"""The compressed entries of a slot that an indexer chooses for each query row."""

from jaxspec_kernels.choose_entries import reference
from jaxspec_kernels.op import Op

choose_entries = Op(
    "choose_entries",
    xla=reference.choose_entries,
    triton="choose_entries.triton_kernel",
    numba="choose_entries.numba_kernel",
)

__all__ = ["choose_entries"]
