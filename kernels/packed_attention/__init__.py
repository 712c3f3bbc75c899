"""Causal attention of texts packed one after another, and its gradients, for training."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.packed_attention.reference import packed_attention as reference
from jaxspec_kernels.packed_attention.reference import packed_attention_gradients as reference_gradients

packed_attention = Op("packed_attention", xla=reference, triton="packed_attention.triton_kernel")
packed_attention_gradients = Op(
    "packed_attention_gradients", xla=reference_gradients, triton="packed_attention.triton_gradients"
)

__all__ = ["packed_attention", "packed_attention_gradients"]
