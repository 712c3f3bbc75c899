"""Conversion between text and token ids, and chat templates."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxspec.checkpoints.chat_template import render_chat
from jaxspec.checkpoints.errors import CheckpointError, foreign
from jaxspec.checkpoints.json_file import MAX_BYTES, read_bytes, read_json
from jaxspec.checkpoints.text_stream import TextStream

_MAX_BYTES = 128 * 2**20
"""The largest `tokenizer.json`, in bytes: four times one with 262,144 tokens."""

_CHARACTERS_PER_TOKEN = 8
"""An upper bound of the mean, except for texts of spaces; English has about four."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A `tokenizers` tokenizer with its special tokens and chat template.

    Attributes:
      backend: the `tokenizers.Tokenizer`.
      chat_template: jinja2 source, or None.
      special_tokens: texts of "bos_token", "eos_token", …
      eos_token_ids: tokens that end an answer, according to the tokenizer's files.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ):
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        named = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        candidates = [*([] if named is None else [named]), *eos_token_ids]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(candidates))

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """Reads `tokenizer.json` and related files; None if there is no `tokenizer.json`.

        Raises:
          CheckpointError: a file cannot be parsed.
        """
        path = folder / "tokenizer.json"
        content = read_bytes(path, _MAX_BYTES, missing_ok=True)
        if content is None:
            return None
        with foreign(path, "not a tokenizer"):
            backend = tokenizers.Tokenizer.from_buffer(content)
        # These are settings for training; here they would cut or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        config = {
            **read_json(folder / "special_tokens_map.json", default={}),
            **read_json(folder / "tokenizer_config.json", default={}),
        }
        special = {name: _token_text(name, config, folder) for name in SPECIAL_TOKENS if config.get(name)}
        return cls(backend, chat_template=_folder_template(folder, config), special_tokens=special)

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which `from_folder` reads back."""
        self.backend.save(str(folder / "tokenizer.json"))
        config = dict(self.special_tokens)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False), "utf-8"
        )

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added ones; the model's vocabulary may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @cached_property
    def special_token_ids(self) -> dict[str, int]:
        """The ids of special tokens, which texts of answers leave out, by their text."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    @cached_property
    def _prepended(self) -> int | None:
        """The special token that `encode` prepends, if it does."""
        ids = self.backend.encode("").ids
        return ids[0] if ids and ids[0] in self.special_token_ids.values() else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in it become their ids.

        Args:
          text: any string of valid Unicode.
          add_special_tokens: prepend the beginning-of-text token, if the model has one and the text does not
            begin with it. Pass False for the output of `apply_chat_template`, which already contains it.

        Raises:
          CheckpointError: the text holds a lone surrogate, or the tokenizer fails.
        """
        _check_unicode(text)
        with foreign("text", "the tokenizer failed"):
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self._with_one_beginning(ids) if add_special_tokens else ids

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of many texts, encoded on all cores; otherwise like `encode`."""
        for text in texts:
            _check_unicode(text)
        with foreign("text", "the tokenizer failed"):
            encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            ids = [each.ids for each in encoded]
            return [*map(self._with_one_beginning, ids)] if add_special_tokens else ids

    def _with_one_beginning(self, ids: list[int]) -> list[int]:
        """The ids without the beginning-of-text token that was prepended, if the text has one."""
        return ids[1:] if len(ids) > 1 and ids[0] == ids[1] == self._prepended else ids

    def check_length(self, text: str, max_tokens: int) -> None:
        """Rejects a text that is far too long without encoding all of it: a million characters take seconds.

        A text that passes may still have somewhat more than `max_tokens` tokens.

        Raises:
          CheckpointError: the text is far longer than `max_tokens` tokens, or `encode` fails.
        """
        if self.characters_past(text, max_tokens) is not None:
            raise CheckpointError(f"text of {len(text)} characters makes more than {max_tokens} tokens")

    def characters_past(self, text: str, max_tokens: int) -> int | None:
        """How many characters of a text that is far too long have more than `max_tokens` tokens.

        None for other texts, which may still have somewhat more. Errors as of `encode`.
        """
        if len(text) <= _CHARACTERS_PER_TOKEN * max_tokens:
            return None
        size, num_tokens = max(_CHARACTERS_PER_TOKEN // 2 * max_tokens, 4096), 0
        for start in range(0, len(text), size):
            num_tokens += len(self.encode(text[start : start + size], add_special_tokens=False))
            # Cutting a text splits a few tokens, but never so many that the number doubles.
            if num_tokens > 2 * max_tokens:
                return start + size
        return None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        text = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        # SentencePiece's decoder also replaces good bytes if they are beside bad ones.
        stream = TextStream(self, skip_special_tokens)
        return stream.feed(ids) + stream.finish()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation as text, including special tokens; arguments as in `render_chat`.

        Raises:
          CheckpointError: there is no chat template, or `render_chat` fails.
        """
        if self.chat_template is None:
            raise CheckpointError("the model has no chat template: pass a plain prompt")
        return render_chat(
            self.chat_template,
            messages,
            self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            arguments=arguments,
        )


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"text is not valid Unicode: lone surrogate at {error.start}") from None


def _folder_template(folder: Path, config: Mapping) -> str | None:
    """`chat_template.jinja` if it exists, else the (default) template of `tokenizer_config.json`."""
    path = folder / "chat_template.jinja"
    content = read_bytes(path, MAX_BYTES, missing_ok=True)
    if content is not None:
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: not UTF-8: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        defaults = [e for e in template if isinstance(e, dict) and e.get("name") == "default"]
        template = defaults[-1].get("template") if defaults else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder}: chat_template must be a string, got {template!r}")
    return template


def _token_text(name: str, config: Mapping[str, Any], folder: Path) -> str:
    """The text of a special token, which is a string or an object with a content."""
    token = config[name]
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise CheckpointError(f"{folder}: {name} must be a string, got {token!r}")
    return text
