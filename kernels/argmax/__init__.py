"""Maximum and argmax over a vocabulary, and the latter with Gumbel noise, which draws from a distribution."""

from jaxspec_kernels.argmax import reference
from jaxspec_kernels.op import Op

argmax = Op("argmax", xla=reference.argmax, numba="argmax.numba_kernel")
gumbel_argmax = Op("gumbel_argmax", xla=reference.gumbel_argmax, numba="argmax.numba_kernel")
row_max = Op("row_max", xla=reference.row_max, numba="argmax.numba_kernel")

__all__ = ["argmax", "gumbel_argmax", "row_max"]
