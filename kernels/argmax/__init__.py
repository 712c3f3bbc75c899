"""Maximum and argmax over a vocabulary, and the latter with Gumbel noise, which draws from a distribution."""

from jaxspec_kernels.argmax import reference
from jaxspec_kernels.op import Op


def _numba():
    from jaxspec_kernels.argmax.numba_kernel import argmax

    return argmax


def _numba_gumbel():
    from jaxspec_kernels.argmax.numba_kernel import gumbel_argmax

    return gumbel_argmax


def _numba_row_max():
    from jaxspec_kernels.argmax.numba_kernel import row_max

    return row_max


argmax = Op("argmax", xla=reference.argmax, numba=_numba)
gumbel_argmax = Op("gumbel_argmax", xla=reference.gumbel_argmax, numba=_numba_gumbel)
row_max = Op("row_max", xla=reference.row_max, numba=_numba_row_max)

__all__ = ["argmax", "gumbel_argmax", "row_max"]
