"""A tokenizer for the targets of `tiny_engines`, and grammars for it."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxspec.files import Tokenizer

END = 2
_MERGED = ['{"', '":', ' "', "ab", "abc", ", "]


def _spelled(text: str) -> list[str]:
    """The characters that stand for the bytes of a text in a byte-level vocabulary."""
    return list(pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)[0][0])


def tiny_tokenizer() -> Tokenizer:
    """Byte-level, for 48 tokens: special ones, letters and digits, parts of é and 😀, and a few merges."""
    merged = ["".join(_spelled(text)) for text in _MERGED]
    singles = dict.fromkeys(_spelled('{}":, []0123456789abcdefghé😀.-ijkl'))
    words = ["<unk>", "<s>", "</s>", *singles, *merged]
    assert len(words) <= 48
    pairs = [(word[:-1], word[-1]) for word in merged]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(words[:3])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


SCHEMA = {
    "type": "object",
    "properties": {"abba": {"type": "integer", "minimum": 0, "maximum": 40}, "cab": {"enum": ["a", "abc"]}},
    "required": ["abba", "cab"],
}
