"""Samples one token per slot and stores it, with the logits that it was drawn from, in a column."""

from jaxspec_kernels.gumbel_sample import reference
from jaxspec_kernels.op import Op


def _triton():
    from jaxspec_kernels.gumbel_sample.triton_kernel import gumbel_sample

    return gumbel_sample


gumbel_sample = Op("gumbel_sample", xla=reference.gumbel_sample, triton=_triton)

__all__ = ["gumbel_sample"]
