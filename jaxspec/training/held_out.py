"""Keeping evaluation prompts out of the training data."""

import re
from collections.abc import Iterable

WORDS_IN_A_ROW = 13


def normalise(text: str) -> tuple[str, ...]:
    """The words of a text, in lower case, without punctuation; a text of marks alone is one word."""
    return tuple(re.findall(r"\w+", text.lower())) or (text.strip(),)


class HeldOut:
    """A set of evaluation prompts; `in` tells whether a text repeats one."""

    def __init__(self, texts: Iterable[str]):
        self._whole: set[tuple[str, ...]] = set()
        self._runs: set[tuple[str, ...]] = set()
        for text in texts:
            words = normalise(text)
            self._whole.add(words)
            self._runs.update(_runs(words))

    def __contains__(self, text: str) -> bool:
        """Whether `text` equals a prompt, or shares 13 words in a row with one."""
        words = normalise(text)
        return words in self._whole or any(run in self._runs for run in _runs(words))


def _runs(words: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    return (words[i : i + WORDS_IN_A_ROW] for i in range(len(words) - WORDS_IN_A_ROW + 1))
