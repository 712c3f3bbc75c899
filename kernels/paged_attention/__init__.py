"""Attention of a few query rows per slot over a paged key/value cache."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.paged_attention.reference import paged_attention as reference

paged_attention = Op(
    "paged_attention",
    xla=reference,
    triton="paged_attention.triton_kernel",
    numba="paged_attention.numba_kernel",
)

__all__ = ["paged_attention"]
