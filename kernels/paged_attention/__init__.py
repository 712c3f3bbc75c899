"""Attention of a few query rows per slot over a paged key/value cache."""

from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.paged_attention.reference import paged_attention as reference

paged_attention = Op("paged_attention", xla=reference)

__all__ = ["paged_attention"]
