"""Attention of a few query rows per slot over listed cache slots and compressed entries."""

from jaxspec_kernels.indexed_attention import reference
from jaxspec_kernels.op import Op

indexed_attention = Op("indexed_attention", xla=reference.indexed_attention)

__all__ = ["indexed_attention"]
