"""The cache slot that each row writes, and the positions that it sees."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.slot_mapping import reference

slot_mapping = Op("slot_mapping", xla=reference.slot_mapping, numba="slot_mapping.numba_kernel")
# On an H200 "xla" takes 2.1 to 4.4 us, the Triton kernel 4.1 to 8.6 us (results/gpu).
place_rows = Op(
    "place_rows",
    xla=reference.place_rows,
    triton="slot_mapping.triton_kernel",
    numba="slot_mapping.numba_kernel",
    only_by_name=("triton",),
)

__all__ = ["place_rows", "slot_mapping"]
