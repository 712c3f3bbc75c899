"""Argmax over a vocabulary, and with Gumbel noise, which draws from a distribution."""

from jaxspec_kernels.argmax import reference
from jaxspec_kernels.dispatch import Op


def _numba():
    from jaxspec_kernels.argmax.numba_kernel import argmax

    return argmax


def _numba_gumbel():
    from jaxspec_kernels.argmax.numba_kernel import gumbel_argmax

    return gumbel_argmax


argmax = Op("argmax", xla=reference.argmax, numba=_numba)
gumbel_argmax = Op("gumbel_argmax", xla=reference.gumbel_argmax, numba=_numba_gumbel)

__all__ = ["argmax", "gumbel_argmax"]
