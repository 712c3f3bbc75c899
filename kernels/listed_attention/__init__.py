"""Attention of a few query rows per slot over cache slots that are listed one by one."""

from jaxspec_kernels.listed_attention import reference
from jaxspec_kernels.op import Op

listed_attention = Op(
    "listed_attention",
    xla=reference.listed_attention,
    triton="listed_attention.triton_kernel",
    numba="listed_attention.numba_kernel",
)

__all__ = ["listed_attention"]
