"""The parameters of Llama 3's rope scaling, from the factors that a GGUF holds in their place."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_PRECISION = 1e-4


def llama3_parameters(factors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` of `config.json` that gives these factors; None if Llama 3's formula does not.

    Only the ratios of `low_freq_factor`, `high_freq_factor` and the original length count: the first is 1.

    Args:
      factors: [D/2] divisors of the inverse frequencies, the largest last.
      theta: the base of the frequencies.
    """
    shares = 1 / np.asarray(factors, np.float64)
    least = float(shares.min())
    turns = theta ** (-np.arange(len(shares)) / len(shares)) / (2 * math.pi)  # per position
    between = (shares > least * (1 + _PRECISION)) & (shares < 1 - _PRECISION)
    # Between the two bands, the share grows linearly with the number of turns in the original length.
    smooth = (shares[between] - least) / (1 - least)
    if len(smooth) < 2:
        high, length = 4.0, 8192  # those of all published models
        if len(smooth):
            length = round(float((1 + (high - 1) * smooth[0]) / turns[between][0]))
    else:
        slope, start = np.polyfit(turns[between], smooth, 1)
        if not start < 0 < slope:
            return None
        high, length = round(1 - 1 / float(start), 2), round(-float(slope / start))
    smooth = np.clip((length * turns - 1) / (high - 1), 0, 1)
    if not np.allclose((1 - smooth) * least + smooth, shares, rtol=_PRECISION):
        return None
    return {
        "rope_type": "llama3",
        "factor": round(1 / least, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }
