"""GGUF metadata of small tokenizers: one byte-level, one SentencePiece."""

from typing import Any

from tiny_gguf import TEMPLATE
from tokenizers.pre_tokenizers import ByteLevel

BYTES = sorted(ByteLevel.alphabet())


def byte_level(pre: str | None = "smollm", **changes: Any) -> dict[str, Any]:
    """Byte-level BPE: special tokens 0 to 2, a user-defined one, 256 bytes, words with and without merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ã ©"]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<a tool>",
        *BYTES,
        *(merge.replace(" ", "") for merge in merges),
        "hey",
    ]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
        **{f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()},
    }
    return {key: value for key, value in values.items() if value is not None}


def sentence_piece() -> dict[str, Any]:
    """SentencePiece: byte tokens from 3 on, and words whose scores order the merges."""
    words = {"▁": -9.0, "h": -10.0, "i": -11.0, "t": -12.0, "hi": -1.0, "▁hi": -2.0, "it": -0.5, "▁h": -3.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
