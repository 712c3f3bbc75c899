"""Random words from keys and counters."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.random_words.reference import random_words as reference
from jaxspec_kernels.random_words.reference import threefry2x32

random_words = Op("random_words", xla=reference, numba="random_words.numba_kernel")

__all__ = ["random_words", "threefry2x32"]
