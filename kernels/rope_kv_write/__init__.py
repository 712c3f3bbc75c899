"""Rotates new queries and keys and writes keys and values into the paged cache, in one pass."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.rope_kv_write import reference

rope_kv_write = Op(
    "rope_kv_write",
    xla=reference.rope_kv_write,
    triton="rope_kv_write.triton_kernel",
    numba="rope_kv_write.numba_kernel",
)

__all__ = ["rope_kv_write"]
