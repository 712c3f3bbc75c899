"""Writes new keys and values into the paged cache."""

from jaxspec_kernels.kv_write import reference
from jaxspec_kernels.op import Op

kv_write = Op("kv_write", xla=reference.kv_write, triton="kv_write.triton_kernel")

__all__ = ["kv_write"]
