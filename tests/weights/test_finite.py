import ml_dtypes
import numpy as np
import pytest

from jaxspec.weights.finite import is_finite

TYPES = (
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [0, 1, 2**18, 2**18 + 5])
def test_it_sees_every_value(dtype, size):
    largest = float(ml_dtypes.finfo(dtype).max)
    array = np.resize(np.asarray([largest, -largest, 0.0, -0.0], dtype), size)
    assert is_finite(array)
    for index in {0, size // 2, size - 1} if size else ():
        for value in (np.nan, -np.nan, np.inf, -np.inf):
            poisoned = array.copy()
            poisoned[index] = value
            assert np.isfinite(poisoned.astype(np.float64)).all() == is_finite(poisoned)


def test_it_sees_values_of_a_transposed_array():
    array = np.zeros((3, 5), np.float32).T
    assert is_finite(array)
    array[4, 1] = np.nan
    assert not is_finite(array)
