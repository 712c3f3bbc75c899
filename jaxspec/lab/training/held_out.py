"""Keeping evaluation prompts out of the training data."""

import re
import unicodedata
from collections.abc import Iterable

WORDS_IN_A_ROW = 13
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\ua980-\ua9ff\uaa60-\uaadf"
    "\u2e80-\u2fdf\u3005-\u3007\u3040-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf"
    "\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U0003ffff"
)
"""Characters of scripts without spaces between words, for a class of a regular expression."""
_WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")


def normalise(text: str) -> tuple[str, ...]:
    """The words of a text, in lower case, without punctuation; a text of marks alone is one word.

    In scripts without spaces between words, such as Chinese, Japanese and Thai, every letter is a word.
    """
    text = text.lower()
    if text.isascii():
        return tuple(re.findall(r"\w+", text)) or (text.strip(),)
    # A vowel sign or an accent of its own is not a letter to `re`, and would end the word.
    letters = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c)[0] != "M")
    return tuple(_WORD.findall(letters)) or (text.strip(),)


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
