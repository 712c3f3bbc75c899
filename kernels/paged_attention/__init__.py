"""Attention of a few query rows per slot over a paged key/value cache."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.paged_attention.reference import paged_attention as reference


def _triton():
    from jaxspec_kernels.paged_attention.triton_kernel import paged_attention

    return paged_attention


def _numba():
    from jaxspec_kernels.paged_attention.numba_kernel import paged_attention

    return paged_attention


paged_attention = Op("paged_attention", xla=reference, triton=_triton, numba=_numba)

__all__ = ["paged_attention"]
