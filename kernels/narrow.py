"""Rounding that a compiled program keeps."""

from typing import Any

import jax
from jax import lax


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """x in a dtype of fewer bits, rounded wherever it is read.

    On a GPU, XLA leaves out a rounding whose result the same program reads in the wider dtype again. A
    barrier between the two keeps it.
    """
    return lax.optimization_barrier(x.astype(dtype))
