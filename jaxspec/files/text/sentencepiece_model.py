"""Tokenizers from `tokenizer.model`, the file of SentencePiece.

Built as transformers 5.23 builds them from such a file. The format is the protocol buffer of
`google/sentencepiece` src/sentencepiece_model.proto; only a few of its fields are read here.
"""

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxspec.files.errors import CheckpointError, foreign

_UNIGRAM, _BPE = 1, 2
_CONTROL, _USER_DEFINED = 3, 4  # types of pieces

_DEFAULTS = (("unk", 0, "<unk>"), ("bos", 1, "<s>"), ("eos", 2, "</s>"))
_LLAMA = {name: text for name, _, text in _DEFAULTS}
_GEMMA = {"unk": "<unk>", "bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "mask": "<mask>"}


# SentencePiece makes words of at most 16 characters by default; bounds the work of finding merges.
_LONGEST_WORD = 256


def merges_of(tokens: Iterable[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that make up one of `tokens`, in their order."""
    return [
        (token[:cut], token[cut:])
        for token in tokens
        if len(token) <= _LONGEST_WORD
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


@dataclass(frozen=True)
class _Model:
    """What is read of the file.

    Attributes:
      pieces: text, score and type of every token.
      kind: _UNIGRAM or _BPE.
      special: texts of "unk", "bos", … as far as the model has them.
      charsmap: the table of its normalisation; empty for none.
    """

    pieces: list[tuple[str, float, int]]
    kind: int
    byte_fallback: bool
    unk_id: int | None
    special: dict[str, str]
    charsmap: bytes


def sentencepiece_backend(
    path: Path,
    content: bytes,
    kind: str,
    config: Mapping[str, Any],
    placed: Mapping[int, str],
    special: Collection[str],
) -> tuple[Backend, dict[str, str]]:
    """The tokenizer of a SentencePiece model, and the texts of its special tokens.

    Args:
      path: the file, for messages.
      content: of the file.
      kind: the class of transformers that says how spaces are marked: "LlamaTokenizer", "GemmaTokenizer", or
        any other text for a model that is used as it is.
      config: the contents of `tokenizer_config.json`.
      placed: texts that take the places of those in the file, by id.
      special: texts of special tokens, which the file may have as ordinary ones.

    Raises:
      CheckpointError: not a SentencePiece model, or one of words or characters.
    """
    with foreign(path, "not a SentencePiece model"):
        model = _parse(content)
    if model.kind not in (_UNIGRAM, _BPE):
        raise CheckpointError(f"{path}: a SentencePiece model of words or characters is not supported")
    texts = [placed.get(i, text) for i, (text, _, _) in enumerate(model.pieces)]
    if len(set(texts)) < len(texts):
        raise CheckpointError(f"{path}: two of its tokens have the same text")
    with foreign(path, "not a tokenizer"):
        if kind == "GemmaTokenizer":
            backend, own = _gemma(texts), _GEMMA
        elif kind == "LlamaTokenizer":
            backend, own = _llama(texts, config), _LLAMA
        else:
            backend, own = _plain(model, texts), model.special
        backend.add_tokens(
            [
                AddedToken(text, normalized=False, special=of == _CONTROL or text in special)
                for text, (_, _, of) in zip(texts, model.pieces, strict=True)
                if of in (_CONTROL, _USER_DEFINED)
            ]
        )
    known = set(texts)
    return backend, {f"{name}_token": text for name, text in own.items() if text in known}


def add_ends(backend: Backend, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Makes the tokenizer add the tokens that `add_bos_token` and `add_eos_token` ask for."""
    asked = {name: special.get(f"{name}_token") for name in ("bos", "eos") if config.get(f"add_{name}_token")}
    ends = {
        name: (text, token_id)
        for name, text in asked.items()
        if text is not None and (token_id := backend.token_to_id(text)) is not None
    }
    if ends:
        texts = {name: [text] for name, (text, _) in ends.items()}
        backend.post_processor = processors.TemplateProcessing(
            single=[*texts.get("bos", []), "$A", *texts.get("eos", [])],
            special_tokens=sorted(set(ends.values())),
        )


def _bpe(texts: list[str], **settings: Any) -> Backend:
    vocabulary = {text: i for i, text in enumerate(texts)}
    # A lower id has the higher score.
    merges = merges_of(texts, vocabulary)
    return Backend(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, **settings))


def _plain(model: _Model, texts: list[str]) -> Backend:
    if model.kind == _BPE:
        unknown = model.special.get("unk")
        backend = _bpe(texts, unk_token=unknown, byte_fallback=model.byte_fallback)
    else:
        scored = [(text, score) for text, (_, score, _) in zip(texts, model.pieces, strict=True)]
        backend = Backend(models.Unigram(scored, unk_id=model.unk_id, byte_fallback=model.byte_fallback))
    spaces = normalizers.Replace(" ", "▁")
    table = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    backend.normalizer = normalizers.Sequence([*table, spaces])
    backend.decoder = _decoder(model.byte_fallback)
    return backend


def _llama(texts: list[str], config: Mapping[str, Any]) -> Backend:
    backend = _bpe(texts, byte_fallback=True)
    prefix = config.get("add_prefix_space") is not False
    # Older versions of its class also marked texts behind special tokens.
    where = "never" if not prefix else "always" if config.get("legacy") is True else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=where, split=False)
    backend.decoder = _decoder(True, *([decoders.Strip(" ", 1, 0)] if prefix else []))
    return backend


def _gemma(texts: list[str]) -> Backend:
    backend = _bpe(texts, unk_token="<unk>", byte_fallback=True)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = _decoder(True)
    return backend


def _decoder(byte_fallback: bool, *more: decoders.Decoder) -> decoders.Decoder:
    bytes_ = [decoders.ByteFallback(), decoders.Fuse()] if byte_fallback else []
    return decoders.Sequence([decoders.Replace("▁", " "), *bytes_, *more])


def _parse(content: bytes) -> _Model:
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(content):
        if field == 1:
            piece = dict(_fields(value))
            (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
            pieces.append((piece.get(1, b"").decode("utf-8"), score, piece.get(3, 1)))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it has no tokens")
    ids = {name: trainer.get(40 + i, default) for i, (name, default, _) in enumerate(_DEFAULTS)}
    special = {
        name: trainer.get(45 + i, text.encode()).decode("utf-8")
        for i, (name, _, text) in enumerate(_DEFAULTS)
        if ids[name] < len(pieces)  # -1, which is a large number here, says that there is none
    }
    return _Model(
        pieces=pieces,
        kind=trainer.get(3, _UNIGRAM),
        byte_fallback=bool(trainer.get(35, 0)),
        unk_id=ids["unk"] if "unk" in special else None,
        special=special,
        charsmap=normalizer.get(2, b""),
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of every field of a message: an int, or the bytes of anything else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}[kind]
        if at + size > len(message):
            raise ValueError("it is cut short")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError("a number in it has no end")
