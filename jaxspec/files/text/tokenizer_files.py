"""The files of a folder that say what its tokenizer does: each may be the only one that says it.

They are read as transformers 5.23 reads them, except that a token keeps the id that a file gives it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxspec.files.byte_level_files import (
    READ_FROM_VOCABULARIES,
    tekken_backend,
    tiktoken_backend,
    vocabulary_backend,
)
from jaxspec.files.errors import CheckpointError, foreign
from jaxspec.files.json_file import MAX_BYTES, read_bytes, read_json
from jaxspec.files.text.sentencepiece_model import add_ends, sentencepiece_backend

_MAX_BYTES = 128 * 2**20
"""The largest `tokenizer.json`, in bytes: four times one with 262,144 tokens."""

_MAX_VALUES = 2_000_000
"""The most values of a file with a vocabulary: twice a `tekken.json` with 131,072 tokens."""
_RANKS = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
"""How a file of tiktoken begins."""
_UNREAD = ("*.tiktoken", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model")
"""Names of files that may hold a tokenizer, in forms that are not read, or only beside another."""
_OF_MODELS = {"gemma": "GemmaTokenizer", "qwen3_5": "", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
"""The class of tokenizers of model types that begin so, for folders that name none."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

CHAT_TEMPLATES = "additional_chat_templates"
"""The subfolder of chat templates with names."""

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]] | None:
    """The tokenizer, the texts of special tokens ("bos_token", …), and the chat templates by name.

    None if the folder has no file of a tokenizer.

    Raises:
      CheckpointError: a file cannot be parsed, two of them contradict each other, or the tokenizer is only in
        a form that is not read.
    """
    config = read_json(folder / "tokenizer_config.json", default={})
    stated = _stated_tokens(folder, config)
    names = read_json(folder / "special_tokens_map.json", default={})
    config = {**config, **names} if stated is None else {**names, **config}
    special = {name: _token_text(name, config, folder) for name in SPECIAL_TOKENS if config.get(name)}
    added = _older_tokens(folder, config) if stated is None else stated
    path = folder / "tokenizer.json"
    if (content := read_bytes(path, _MAX_BYTES, missing_ok=True)) is not None:
        with foreign(path, "not a tokenizer"):
            backend = tokenizers.Tokenizer.from_buffer(content)
        if stated is None:  # `tokenizer.json` is newer
            newer = {token.content for token in backend.get_added_tokens_decoder().values()}
            added = {number: token for number, token in added.items() if token.content not in newer}
        _add_tokens(backend, added, config, folder)
    else:
        placed = {i: token.content for i, token in added.items()}
        found = _without_json(folder, config, placed, set(special.values()))
        if found is None:
            return None
        backend, own, ends = found
        special = {**own, **special}
        _add_tokens(backend, added, {**special, **config}, folder)
        add_ends(backend, {**ends, **config}, special)
    # These are settings for training; here they would cut or pad prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend, special, _templates(folder, config)


def _without_json(
    folder: Path, config: Mapping[str, Any], placed: Mapping[int, str], special: set[str]
) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, bool]] | None:
    """The tokenizer of a folder without `tokenizer.json`, the texts of its special tokens, and which of them
    it adds to a text by default.

    Args:
      placed: texts of added tokens by id.
      special: texts of special tokens.
    """
    kind = _kind(folder, config)
    tekken, vocabulary = (
        read_json(folder / name, default={}, max_bytes=_MAX_BYTES, max_values=_MAX_VALUES)
        for name in ("tekken.json", "vocab.json")
    )
    if tekken:
        return *tekken_backend(folder / "tekken.json", tekken), {"add_bos_token": True}
    for path in (folder / "tokenizer.model", folder / "tiktoken.model"):
        if (content := read_bytes(path, _MAX_BYTES, missing_ok=True)) is None:
            continue
        if _RANKS.match(content):
            return tiktoken_backend(path, content, placed), {}, {}
        return *sentencepiece_backend(path, content, kind, config, placed, special), {}
    merges = read_bytes(folder / "merges.txt", _MAX_BYTES, missing_ok=True)
    if vocabulary and merges is not None and kind in READ_FROM_VOCABULARIES:
        text = _text(folder / "merges.txt", merges)
        return *vocabulary_backend(folder / "vocab.json", vocabulary, text, kind, config), {}
    there = sorted({path.name for pattern in _UNREAD for path in folder.glob(pattern)})
    if there:
        raise CheckpointError(
            f"{folder}: its tokenizer is only in {', '.join(there)}, which is not read"
            f"{f' for a {kind}' if kind else ''}; write a tokenizer.json: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers"
        )
    return None


def _kind(folder: Path, config: Mapping[str, Any]) -> str:
    """The class of transformers that a SentencePiece model or a `vocab.json` is meant for."""
    named = config.get("tokenizer_class")
    if isinstance(named, str):
        return named.removesuffix("Fast")
    model_type = str(read_json(folder / "config.json", default={}).get("model_type"))
    return next((kind for start, kind in _OF_MODELS.items() if model_type.startswith(start)), "")


def _stated_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken] | None:
    """The tokens of `added_tokens_decoder` by id; None if the config has none."""
    stated = config.get("added_tokens_decoder")
    if stated is None:
        return None
    where = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
    if not isinstance(stated, dict):
        raise CheckpointError(f"{where} must be an object, got {stated!r}")
    return {_token_id(number, where): _added_token(token, where) for number, token in stated.items()}


def _older_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The tokens of `added_tokens.json` by id."""
    named = {token.content for token in _named_tokens(config, folder)}
    path = folder / "added_tokens.json"
    return {
        _token_id(number, str(path)): AddedToken(text, normalized=text not in named, special=text in named)
        for text, number in read_json(path, default={}).items()
    }


def _token_id(number: Any, where: str) -> int:
    if isinstance(number, str) and number.isdecimal() and len(number) < 10:
        number = int(number)
    if type(number) is not int or not 0 <= number < 2**31:
        raise CheckpointError(f"{where}: {number!r} is no token id")
    return number


def _added_token(token: Any, where: str) -> AddedToken:
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        raise CheckpointError(f"{where} must hold objects with a content, got {token!r}")
    flags = {name: token[name] for name in _FLAGS if name in token}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise CheckpointError(f"{where}: {token['content']!r} has a flag that is neither true nor false")
    return AddedToken(token["content"], **flags)


def _named_tokens(config: Mapping[str, Any], folder: Path) -> list[AddedToken]:
    """The special tokens that a config names: by a key "…_token", or in a list of further ones."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    tokens = []
    for value in named:
        if isinstance(value, str):
            tokens.append(AddedToken(value, special=True))
        elif isinstance(value, dict):
            tokens.append(_added_token({**value, "special": True}, f"{folder}: special tokens"))
    return tokens


def _add_tokens(
    backend: tokenizers.Tokenizer, added: Mapping[int, AddedToken], config: Mapping[str, Any], folder: Path
) -> None:
    """Adds the tokens that the tokenizer lacks, or has with other flags.

    Raises:
      CheckpointError: one cannot have the id that a file gives it.
    """
    own = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    named = _named_tokens(config, folder)
    special = {token.content for token in named}
    with foreign(folder, "added tokens"):
        for _, token in sorted(added.items()):
            token.special = token.special or token.content in special
            if own.get(token.content) != repr(token):
                backend.add_tokens([token])
        known = {*own, *(token.content for token in added.values())}
        backend.add_tokens([token for token in named if token.content and token.content not in known])
    for number, token in sorted(added.items()):
        found = backend.token_to_id(token.content)
        if token.content and found != number:
            raise CheckpointError(
                f"{folder}: the added token {token.content!r} is {number}, but the tokenizer makes it {found}"
            )


def _token_text(name: str, config: Mapping[str, Any], folder: Path) -> str:
    """The text of a special token, which is a string or an object with a content."""
    token = config[name]
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise CheckpointError(f"{folder}: {name} must be a string, got {token!r}")
    return text


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name: from files of their own if there are any, else from the config, else from
    the file of a model that also takes images."""
    files = [folder / "chat_template.jinja", *sorted((folder / CHAT_TEMPLATES).glob("*.jinja"))]
    found = {
        ("default" if path == files[0] else path.stem): _text(path, content)
        for path in files
        if (content := read_bytes(path, MAX_BYTES, missing_ok=True)) is not None
    }
    if found:
        return found
    stated = config.get("chat_template")
    if stated is None:
        stated = read_json(folder / "chat_template.json", default={}).get("chat_template")
    if isinstance(stated, list):
        entries = [each for each in stated if isinstance(each, dict) and isinstance(each.get("name"), str)]
        stated = {entry["name"]: entry.get("template") for entry in entries}
    elif not isinstance(stated, dict):
        stated = {"default": stated}
    for template in stated.values():
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{folder}: chat_template must be a string, got {template!r}")
    return {name: template for name, template in stated.items() if template is not None}


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}") from None
