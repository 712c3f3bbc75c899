"""Rotates new queries and keys and writes keys and values into the paged cache, in one pass."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.rope_kv_write import reference


def _triton():
    from jaxspec_kernels.rope_kv_write.triton_kernel import rope_kv_write

    return rope_kv_write


def _numba():
    from jaxspec_kernels.rope_kv_write.numba_kernel import rope_kv_write

    return rope_kv_write


rope_kv_write = Op("rope_kv_write", xla=reference.rope_kv_write, triton=_triton, numba=_numba)

__all__ = ["rope_kv_write"]
