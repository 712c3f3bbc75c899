"""Vocabularies that grammars are compiled for: the default model's, a byte-level one, SentencePiece's."""

from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

from tiny_tokenizers import byte_level

from jaxspec.config import load_config
from jaxspec.files import Tokenizer, open_checkpoint
from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf
from jaxspec.grammar import Vocabulary

TOKENIZERS = Path(__file__).with_name("goldens") / "tokenizers"
NAMES = ("smollm2", "bytes", "llama")


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == "smollm2":
        target = load_config("smollm2-135m").target
        return open_checkpoint(target.source, target.file, target.sha256, progress=False).tokenizer
    if name == "bytes":
        return tokenizer_from_gguf(byte_level(), "bytes")
    return Tokenizer.from_folder(TOKENIZERS / name)


@cache
def vocabulary(name: str) -> Vocabulary:
    tokens = tokenizer(name)
    return Vocabulary.of(tokens, tokens.vocab_size + 3, tokens.eos_token_ids)


@cache
def large_vocabulary() -> Vocabulary:
    """As many tokens as Qwen's models have: SmolLM2's, and pairs of them."""
    words = vocabulary("smollm2")
    short = sorted(text for text in set(words.texts.values()) if len(text) < 6)
    pairs = (one + short[place - shift] for shift in range(9) for place, one in enumerate(short))
    new = islice(dict.fromkeys(pairs).keys() - set(words.texts.values()), 151_936 - words.size)
    texts = {**words.texts, **dict(enumerate(sorted(new), words.size))}
    return replace(words, texts=texts, size=words.size + len(texts) - len(words.texts))
