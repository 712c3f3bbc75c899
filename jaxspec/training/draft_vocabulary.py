"""Which of the target's tokens a head can draft: the most frequent ones of the answers."""

import numpy as np

from jaxspec.config import ConfigError

VOCABULARY = "vocabulary.npy"


def token_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """i64[V], how often each token occurs."""
    return np.bincount(tokens, minlength=vocab_size)


def choose_vocabulary(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent token ids, rising; the lowest unused ids fill up where fewer occur.

    Args:
      counts: i64[V].

    Raises:
      ConfigError: more tokens are asked for than the target has.
    """
    if not 1 <= size <= counts.size:
        raise ConfigError(
            f"vocabulary.size must be between 1 and the target's vocabulary of {counts.size}, got {size}"
        )
    by_frequency = np.argsort(-counts, kind="stable")
    return np.sort(by_frequency[:size]).astype(np.int32)


def coverage(counts: np.ndarray, target_ids: np.ndarray) -> float:
    """The share of all tokens that the draft vocabulary holds."""
    return float(counts[target_ids].sum() / max(counts.sum(), 1))
