"""Samples one token per slot and stores it, with the logits that it was drawn from, in a column."""

from jaxspec_kernels.gumbel_sample import reference
from jaxspec_kernels.op import Op

gumbel_sample = Op("gumbel_sample", xla=reference.gumbel_sample, triton="gumbel_sample.triton_kernel")

__all__ = ["gumbel_sample"]
