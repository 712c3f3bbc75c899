"""Writes new keys and values into the paged cache."""

from jaxspec_kernels.kv_write import reference
from jaxspec_kernels.op import Op


def _triton():
    from jaxspec_kernels.kv_write.triton_kernel import kv_write

    return kv_write


kv_write = Op("kv_write", xla=reference.kv_write, triton=_triton)

__all__ = ["kv_write"]
