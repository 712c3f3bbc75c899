"""Writing new keys and values into the paged cache."""

from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.kv_write import reference

kv_write = Op("kv_write", xla=reference.kv_write)

__all__ = ["kv_write"]
