"""Sampling one token per slot and storing it, with the logits it was drawn from, in a column."""

from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.gumbel_sample import reference

gumbel_sample = Op("gumbel_sample", xla=reference.gumbel_sample)

__all__ = ["gumbel_sample"]
