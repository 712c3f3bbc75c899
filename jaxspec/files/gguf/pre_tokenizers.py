"""Pre-tokenizers of byte-level BPE models, by their names in GGUF files."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PreTokenizer:
    """How a text is split into words, and other settings that the name implies.

    Attributes:
      expressions: regular expressions, applied in order, each to the pieces left by the one before.
      takes_whole_words: a word that is in the vocabulary becomes one token even if no merges produce it.
      adds_bos: whether texts begin with the beginning-of-text token, if the file does not say.
    """

    expressions: tuple[str, ...]
    takes_whole_words: bool = False
    adds_bos: bool = False


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str, letters: str = r"\p{L}") -> str:
    rest = rf"|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{numbers}| ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return _ENDINGS + rest + _SPACES


def _cased_words(endings: str, numbers: str) -> str:
    """An expression for words that end before a capital letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}{upper}*{lower}+{endings}|{first}{upper}+{lower}*{endings}"
    return words + "|" + numbers + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2_WORDS = PreTokenizer((_GPT2,))
_GPT2_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_SINGLE_DIGITS = PreTokenizer((_words(r"\p{N}"),))
_THREE_DIGITS = PreTokenizer((_words(r"\p{N}{1,3}"),))
_LLAMA3 = replace(_THREE_DIGITS, takes_whole_words=True, adds_bos=True)
_O200K = PreTokenizer((_cased_words(f"{_ENDINGS}?", r"\p{N}{1,3}"),))
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Chinese characters, hiragana, katakana
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES,
    )
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    # llama.cpp's default for files that name none.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_WORDS,
    "olmo": _GPT2_WORDS,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "command-r": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": _THREE_DIGITS,
    "dbrx": _THREE_DIGITS,
    "glm4": _THREE_DIGITS,
    "chatglm-bpe": _THREE_DIGITS,
    "qwen2": _SINGLE_DIGITS,
    "qwen35": PreTokenizer((_words(r"\p{N}", letters=r"\p{L}\p{M}"),)),
    "deepseek-r1-qwen": _SINGLE_DIGITS,
    "megrez": _SINGLE_DIGITS,
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "tekken": replace(PreTokenizer((_cased_words("", r"\p{N}"),)), takes_whole_words=True, adds_bos=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
}
"""By `tokenizer.ggml.pre`."""
