"""Attention of a few query rows per slot over cache slots that are listed one by one."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.sparse_attention import reference

sparse_attention = Op(
    "sparse_attention",
    xla=reference.sparse_attention,
    triton="sparse_attention.triton_kernel",
    numba="sparse_attention.numba_kernel",
)

__all__ = ["sparse_attention"]
