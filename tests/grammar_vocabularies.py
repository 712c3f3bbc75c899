"""Vocabularies that grammars are compiled for: the default model's, a byte-level one, SentencePiece's."""

from functools import cache
from pathlib import Path

from tiny_tokenizers import byte_level

from jaxspec.checkpoints import Tokenizer, open_checkpoint
from jaxspec.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jaxspec.config import load_config
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
