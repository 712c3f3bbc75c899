"""The draft vocabulary: the most frequent tokens of the answers."""

import numpy as np

from jaxspec.config import ConfigError

VOCABULARY = "vocabulary.npy"


def token_counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """i64[V]: how often each token occurs."""
    return np.bincount(tokens, minlength=vocab_size)


def choose_vocabulary(counts: np.ndarray, size: int, known: np.ndarray | None = None) -> np.ndarray:
    """i32[size]: the most frequent token ids, in that order. Ties prefer ids in `known`, then lower ids.

    Args:
      counts: i64[V].
      size: number of tokens, W.
      known: ids that the initial head drafts.

    Raises:
      ConfigError: `size` is less than 1 or more than V.
    """
    if not 1 <= size <= counts.size:
        raise ConfigError(
            f"vocabulary.size must be between 1 and the target's vocabulary of {counts.size}, got {size}"
        )
    is_new = np.ones(counts.size, bool)
    if known is not None:
        is_new[known] = False
    best = np.lexsort((np.arange(counts.size), is_new, -counts))
    return best[:size].astype(np.int32)


def draft_order(target_ids: np.ndarray) -> np.ndarray:
    """i32[W]: the draft ids of `target_ids`; draft ids number the same tokens in ascending order."""
    return np.argsort(np.argsort(target_ids)).astype(np.int32)


def coverage(counts: np.ndarray, target_ids: np.ndarray) -> float:
    """The share of all counted tokens that are in the draft vocabulary."""
    return float(counts[target_ids].sum() / max(counts.sum(), 1))
