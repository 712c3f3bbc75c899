"""The product of a few rows with a weight."""

from jaxspec_kernels.matmul.packed_weight import BLOCK, PackedRows, PackedWeight, pack
from jaxspec_kernels.matmul.reference import matmul as reference
from jaxspec_kernels.op import Op

# Smaller weights stay in a CPU's caches, so that neither the kernel nor packing pays for them.
MIN_WEIGHT_BYTES = 1 << 20


matmul = Op(
    "matmul",
    xla=reference,
    triton="matmul.triton_kernel",
    numba="matmul.numba_kernel",
    only_if_exact=("triton",),
)

__all__ = ["BLOCK", "MIN_WEIGHT_BYTES", "PackedRows", "PackedWeight", "matmul", "pack"]
