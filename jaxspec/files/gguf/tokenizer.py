"""Tokenizers from the metadata of a GGUF."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from jaxspec.files.errors import CheckpointError, foreign
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.files.gguf.pre_tokenizers import PRE_TOKENIZERS
from jaxspec.files.text.sentencepiece_model import merges_of
from jaxspec.files.text.tokenizer import Tokenizer

# Token types, as in the `gguf` package's TokenType.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# llama.cpp's, by tokenizer model. Its 11 is Falcon's "<|endoftext|>"; in others that is a word.
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
}

# Models end a turn, a text or a tool call with these, and files name only some of them. They are those of
# llama.cpp, and GLM's "<|observation|>".
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|return|>", "<turn|>", "<end_of_utterance>"),
    *(
        "<|endoftext|>",
        "<|end_of_text|>",
        "</s>",
        "<eos>",
        "[EOS]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    *("<EOT>", "_<EOT>", "[EOT]", "[e~["),
    *("<|eom_id|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<|observation|>"),
)
# Tokens that some models write inside an answer: those whose vocabulary has all tokens of one of the sets.
_INSIDE = {
    "<|end|>": ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}),
    "</s>": ({"<|tool_response>"},),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], name: str) -> Tokenizer | None:
    """Builds the tokenizer that `tokenizer.*` describes; None if the file has none.

    Args:
      metadata: all of the file's metadata.
      name: the file, for messages.

    Raises:
      CheckpointError: an unknown tokenizer model or pre-tokenizer, or damaged metadata.
    """
    meta = Metadata(name, metadata)
    model = meta.text("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    builders = {"gpt2": _byte_level, "llama": _by_score, "gemma4": _by_merges}
    if model not in builders:
        raise CheckpointError(
            f"{name}: tokenizer model {model!r} is not supported; supported: {', '.join(builders)}"
        )
    tokens = meta.list("tokenizer.ggml.tokens", str, [])
    if not tokens:
        raise CheckpointError(f"{name}: metadata tokenizer.ggml.tokens is missing")
    # As in llama.cpp, so that several tokens without a text have one of their own.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    types = _types(meta, tokens)
    ids = _special_ids(meta, tokens, types)
    ends = _end_tokens(tokens, types, ids)
    for end in ends:
        types[end] = _CONTROL
    with foreign(name, "not a tokenizer"):
        backend = builders[model](meta, tokens, ids)
        _add_special_tokens(backend, tokens, types)
        _add_bos(backend, meta, tokens, ids["bos"])
    spelled = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return Tokenizer(
        backend,
        chat_template=_templates(meta),
        special_tokens={
            f"{key}_token": tokens[token_id]
            for key, field in spelled.items()
            if (token_id := ids[field]) is not None
        },
        eos_token_ids=ends,
    )


def _templates(meta: Metadata) -> dict[str, str]:
    """The chat templates by name: "default", and those that the file names."""
    named = {
        name: f"tokenizer.chat_template.{name}" for name in meta.list("tokenizer.chat_templates", str, [])
    }
    found = {
        name: meta.text(key, None) for name, key in {**named, "default": "tokenizer.chat_template"}.items()
    }
    return {name: template for name, template in found.items() if template is not None}


def _special_ids(meta: Metadata, tokens: Sequence[str], types: Sequence[int]) -> dict[str, int | None]:
    """The ids of "bos", "eos", …: the file's, or llama.cpp's for those that it lacks or gets wrong."""
    model = meta.text("tokenizer.ggml.model", "none")
    ids: dict[str, int | None] = {}
    for field in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        stated = meta.whole(f"tokenizer.ggml.{field}_token_id", -1)
        default = _DEFAULT_IDS[model].get(field, -1)
        if model == "gpt2" and default < len(tokens) and types[default] != _CONTROL:
            default = -1
        ids[field] = next((i for i in (stated, default) if 0 <= i < len(tokens)), None)
    return ids


def _types(meta: Metadata, tokens: Sequence[str]) -> list[int]:
    """The type of every token; 0 where the file does not say it."""
    types = meta.list("tokenizer.ggml.token_type", int, [])
    return [*types, *[0] * (len(tokens) - len(types))][: len(tokens)]


def _end_tokens(tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int | None]) -> list[int]:
    """Ids that end an answer: those that the file names, and others that it may leave out."""
    known = set(tokens)
    inside = {token for token, marks in _INSIDE.items() if any(others <= known for others in marks)}
    found = [token_id for field in ("eos", "eot", "eom") if (token_id := ids[field]) is not None]
    typed = enumerate(zip(tokens, types, strict=True))
    found += [i for i, (token, kind) in typed if kind != _NORMAL and token in _ENDS and token not in inside]
    return list(dict.fromkeys(found))


def _byte_level(meta: Metadata, tokens: list[str], ids: Mapping[str, int | None]) -> Backend:
    """Byte-level BPE: merges over bytes written as printable characters."""
    pre = meta.text("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{meta.file}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
        )
    merges = _merges(meta)
    cuts = PRE_TOKENIZERS[pre]
    vocabulary = _vocabulary(meta, tokens)
    with foreign(meta.file, "metadata tokenizer.ggml.merges"):
        backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cuts.takes_whole_words))
    splits = [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in cuts.expressions]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(meta: Metadata) -> list[Any]:
    return [tuple(merge.split(" ")) for merge in meta.list("tokenizer.ggml.merges", str, [])]


def _vocabulary(meta: Metadata, tokens: Sequence[str]) -> dict[str, int]:
    """Ids by text. Of several texts that are no UTF-8, and so look alike, only the first has an id."""
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        first = vocabulary.setdefault(token, token_id)
        if first != token_id and "\N{REPLACEMENT CHARACTER}" not in token:
            twice = f"token {token_id} has the text of token {first}, {token!r}"
            raise CheckpointError(f"{meta.file}: metadata tokenizer.ggml.tokens: {twice}")
    return vocabulary


def _by_score(meta: Metadata, tokens: list[str], ids: Mapping[str, int | None]) -> Backend:
    """SentencePiece BPE (Llama 1 and 2, Mistral): merges by descending score."""
    scores = meta.list("tokenizer.ggml.scores", float, [])
    if len(scores) != len(tokens):
        raise CheckpointError(f"{meta.file}: metadata tokenizer.ggml.scores does not fit the tokens")
    vocabulary = _vocabulary(meta, tokens)
    by_score = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = merges_of((tokens[i] for i in by_score), vocabulary)
    return _sentence_piece(meta, tokens, ids, vocabulary, merges)


def _by_merges(meta: Metadata, tokens: list[str], ids: Mapping[str, int | None]) -> Backend:
    """SentencePiece BPE whose file lists the merges (Gemma 4)."""
    return _sentence_piece(meta, tokens, ids, _vocabulary(meta, tokens), _merges(meta))


def _sentence_piece(
    meta: Metadata,
    tokens: list[str],
    ids: Mapping[str, int | None],
    vocabulary: dict[str, int],
    merges: list[Any],
) -> Backend:
    """Merges over a text whose spaces are marked, with byte fallback."""
    unknown = tokens[ids["unknown"] or 0]
    backend = Backend(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = meta.flag("tokenizer.ggml.add_space_prefix", meta.text("tokenizer.ggml.model", "") == "llama")
    marks = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _add_special_tokens(backend: Backend, tokens: list[str], types: list[int]) -> None:
    typed = list(zip(tokens, types, strict=True))
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in typed if kind in (_UNKNOWN, _CONTROL)]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED])


def _add_bos(backend: Backend, meta: Metadata, tokens: list[str], bos: int | None) -> None:
    """Prepends the beginning-of-text token, if the file or its kind of tokenizer asks for it."""
    model = meta.text("tokenizer.ggml.model", "")
    by_kind = model != "gpt2" or PRE_TOKENIZERS[meta.text("tokenizer.ggml.pre", "default")].adds_bos
    # Some files of Gemma 4 state the wrong value; llama.cpp overrides it.
    is_added = model == "gemma4" or meta.flag("tokenizer.ggml.add_bos_token", by_kind)
    if is_added and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )
