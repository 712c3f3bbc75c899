"""Byte-level tokenizers from other files than `tokenizer.json`.

They hold tiktoken's ranks, or Mistral's (`tekken.json`), or a vocabulary and its merges (`vocab.json` beside
`merges.txt`). Built as transformers 5.23 builds them: `convert_slow_tokenizer.py`, `integrations/mistral`,
`models/qwen2` and `models/gpt2`.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxspec.files.errors import CheckpointError, foreign
from jaxspec.files.text.text_stream import byte_level_alphabet

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPECIAL = {"bos": "<s>", "eos": "</s>"}
_END = "<|endoftext|>"
_OF_CLASS: Mapping[str, tuple[str | None, tuple[str, ...]]] = {
    "Qwen2Tokenizer": (_QWEN2, ("unk", "eos", "pad")),
    "GPT2Tokenizer": (None, ("unk", "bos", "eos")),
}
"""Of every class that reads `vocab.json`: where it cuts texts (None as GPT-2), and which special tokens are
"<|endoftext|>" if no file says what they are."""
READ_FROM_VOCABULARIES = tuple(_OF_CLASS)

_MOST_TOKENS = 2**20
_LONGEST = 256
"""The longest token whose merges are found, in bytes; bounds the work."""


def tiktoken_backend(path: Path, content: bytes, placed: Mapping[int, str]) -> Backend:
    """The tokenizer of a file of tiktoken, with a token in base64 and its rank in every line.

    Args:
      path: the file, for messages.
      content: of the file.
      placed: texts of further tokens by id; ids that are left out between them become reserved tokens.

    Raises:
      CheckpointError: not such a file.
    """
    with foreign(path, "not a file of tiktoken"):
        lines = [line.split() for line in content.splitlines() if line]
        tokens = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    backend = _of_ranks(path, tokens, 0, {}, _LLAMA3)
    more = range(len(tokens), max(placed, default=0) + 1)
    _check_count(path, len(more))
    names = [placed.get(i, f"<|reserved_token_{i}|>") for i in more]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return backend


def tekken_backend(path: Path, values: Mapping[str, Any]) -> tuple[Backend, dict[str, str]]:
    """The tokenizer of a `tekken.json`, and the texts of its special tokens ("bos_token", …).

    Args:
      path: the file, for messages.
      values: its contents.

    Raises:
      CheckpointError: it has another form, or does not list its special tokens, as its first version.
    """
    if "special_tokens" not in values:
        raise CheckpointError(
            f"{path}: lists no special_tokens, as the first version of the format; only later ones are read"
        )
    with foreign(path, "not a tekken.json"):
        config = values["config"]
        stated = {each["rank"]: each["token_str"] for each in values["special_tokens"]}
        count = config.get("default_num_special_tokens") or len(stated)
        _check_count(path, count)
        special = {stated.get(i, f"<SPECIAL_{i}>"): i for i in range(count)}
        size = config.get("default_vocab_size")
        entries = values["vocab"] if size is None else values["vocab"][: size - count]
        tokens = {base64.b64decode(entry["token_bytes"]): rank for rank, entry in enumerate(entries)}
        backend = _of_ranks(path, tokens, count, special, config["pattern"])
        backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    named = {f"{name}_token": text for name, text in _TEKKEN_SPECIAL.items() if text in special}
    return backend, named


def vocabulary_backend(
    path: Path, vocabulary: Mapping[str, Any], merges: str, kind: str, config: Mapping[str, Any]
) -> tuple[Backend, dict[str, str]]:
    """The tokenizer of a `vocab.json` and its `merges.txt`, and the texts of its special tokens.

    Args:
      path: of the vocabulary, for messages.
      vocabulary: ids by text.
      merges: the other file's content, a pair of tokens in every line.
      kind: one of `READ_FROM_VOCABULARIES`.
      config: the contents of `tokenizer_config.json`.

    Raises:
      CheckpointError: the files have another form, or contradict each other.
    """
    expression, ends = _OF_CLASS[kind]
    lines = (line.rstrip("\r") for line in merges.split("\n") if not line.startswith("#version"))
    with foreign(path, "not a vocabulary with its merges"):
        pairs: list[Any] = [tuple(line.split(" ")) for line in lines if line]
        backend = Backend(models.BPE(vocab=dict(vocabulary), merges=pairs))
    _cut(backend, expression, prefix=config.get("add_prefix_space") is True)
    if kind.startswith("Qwen"):
        backend.normalizer = normalizers.NFC()
    missing = (f"{name}_token" for name in ends if f"{name}_token" not in config)
    return backend, dict.fromkeys(missing, _END)


def _of_ranks(
    path: Path, tokens: Mapping[bytes, int], start: int, special: Mapping[str, int], expression: str
) -> Backend:
    """A tokenizer whose tokens merge in the order of their ranks; ids of tokens begin with `start`."""
    _check_count(path, len(tokens))
    missing = [byte for byte in range(256) if bytes([byte]) not in tokens]
    if missing:
        raise CheckpointError(f"{path}: has no token for {len(missing)} bytes, {missing[0]} among them")
    characters = {byte: character for character, byte in byte_level_alphabet().items()}
    texts = {"".join(map(characters.__getitem__, token)): rank for token, rank in tokens.items()}
    vocabulary = {**{text: rank + start for text, rank in texts.items()}, **special}
    with foreign(path, "not a tokenizer"):
        backend = Backend(models.BPE(vocab=vocabulary, merges=_merges(texts), ignore_merges=True))
        _cut(backend, expression, prefix=False)
    return backend


def _merges(ranks: Mapping[str, int]) -> Sequence[tuple[str, str]]:
    """All pairs of tokens that make up another, by its rank, then by theirs."""
    pairs: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = range(1, len(token) if len(token) <= _LONGEST else 0)
        found = [(token[:at], token[at:]) for at in cuts if token[:at] in ranks and token[at:] in ranks]
        pairs += sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return pairs


def _cut(backend: Backend, expression: str | None, *, prefix: bool) -> None:
    """Cuts texts where an expression says, or as GPT-2 does, and makes bytes of them."""
    if expression is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    else:
        split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()


def _check_count(path: Path, count: int) -> None:
    if not 0 <= count <= _MOST_TOKENS:
        raise CheckpointError(f"{path}: has {count} tokens, and at most {_MOST_TOKENS} are read")
