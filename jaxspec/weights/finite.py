"""Checking weights for NaN and infinity."""

import numpy as np

_BLOCK = 2**18


def is_finite(array: np.ndarray) -> bool:
    """Whether no value is NaN or infinite, for any float dtype, including those of `ml_dtypes`.

    For bfloat16, `np.isfinite` takes five times as long, since it converts to float32. Working in blocks that
    fit the cache, 8 billion values take 3 to 5 seconds.
    """
    bits = np.dtype(f"u{array.itemsize}")
    # The exponent bits of infinity are all set, and so are those of NaN.
    infinity = np.asarray(np.inf, array.dtype).view(bits)
    flat = array.reshape(-1).view(bits)
    return all(
        (flat[start : start + _BLOCK] & infinity).max() != infinity for start in range(0, flat.size, _BLOCK)
    )
