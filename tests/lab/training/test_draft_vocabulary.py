"""The draft vocabulary: the most frequent tokens, how much they cover, and their order."""

import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.lab.training.draft_vocabulary import choose_vocabulary, coverage, draft_order, token_counts

COUNTS = token_counts(np.array([5, 5, 5, 9, 9, 1, 7, 7]), 12)


def test_the_most_frequent_tokens_come_first():
    assert choose_vocabulary(COUNTS, 3).tolist() == [5, 7, 9]
    assert choose_vocabulary(COUNTS, 4).tolist() == [5, 7, 9, 1]
    assert coverage(COUNTS, choose_vocabulary(COUNTS, 3)) == 7 / 8


def test_the_lowest_unused_ids_fill_up():
    assert choose_vocabulary(COUNTS, 6).tolist() == [5, 7, 9, 1, 0, 2]


def test_what_a_head_knows_fills_up_before_the_lowest_unused_ids():
    assert choose_vocabulary(COUNTS, 6, known=np.array([3, 9, 11])).tolist() == [5, 9, 7, 1, 3, 11]
    # A token that occurs is worth more than one that was known.
    assert choose_vocabulary(COUNTS, 4, known=np.array([3, 9, 11])).tolist() == [5, 9, 7, 1]


def test_draft_ids_number_the_tokens_in_rising_order():
    assert draft_order(np.array([50, 7, 90, 10])).tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize("size", [0, 13])
def test_a_size_that_cannot_be(size):
    with pytest.raises(ConfigError, match="between 1 and the target's vocabulary of 12"):
        choose_vocabulary(COUNTS, size)
