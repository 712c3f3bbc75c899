"""Conversion between text and token ids, and chat templates."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxspec.files.errors import CheckpointError, foreign
from jaxspec.files.text.chat_template import render_chat
from jaxspec.files.text.messages import as_messages
from jaxspec.files.text.special_text import SpecialText
from jaxspec.files.text.text_stream import TextStream, token_bytes
from jaxspec.files.text.tokenizer_files import read_tokenizer

LONGER = "load with a larger one (--max-model-len)"
"""What lets an engine take a longer prompt."""
_CHARACTERS_PER_TOKEN = 8
"""An upper bound of the mean, except for texts of spaces; English has about four."""
_FOR_TOOLS = "tool_use"
"""The name of the template that Hugging Face's tokenizers take where there are tools."""
_CUT, _SPACE = "\ufdd1", " "
"""Put behind an answer that goes on: no text has the character, and a template that trims takes the space."""


class Tokenizer:
    """A `tokenizers` tokenizer with its special tokens and chat template.

    Attributes:
      backend: the `tokenizers.Tokenizer`.
      chat_templates: jinja2 sources by name.
      chat_template: the one that is used: "default", or the only one; None if there is no such template.
        Where there are tools, "tool_use" takes its place.
      special_tokens: texts of "bos_token", "eos_token", …
      eos_token_ids: tokens that end an answer, according to the tokenizer's files.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ):
        self.backend = backend
        templates = {"default": chat_template} if isinstance(chat_template, str) else chat_template or {}
        self.chat_templates = dict(templates)
        only = next(iter(templates.values())) if len(templates) == 1 else None
        self.chat_template = templates.get("default", only)
        self.special_tokens = dict(special_tokens or {})
        named = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        candidates = [*([] if named is None else [named]), *eos_token_ids]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(candidates))

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """Reads `tokenizer.json`, or a file of another form, and those beside it; None without any.

        Raises:
          CheckpointError: a file cannot be parsed, or two of them contradict each other.
        """
        found = read_tokenizer(folder)
        if found is None:
            return None
        backend, special, templates = found
        return cls(backend, chat_template=templates, special_tokens=special)

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which transformers reads too."""
        self.backend.save(str(folder / "tokenizer.json"))
        # Without this class, transformers builds the tokenizer of the model's family around the vocabulary.
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        config["clean_up_tokenization_spaces"] = False
        if list(self.chat_templates) == ["default"]:
            config["chat_template"] = self.chat_template
        elif self.chat_templates:
            config["chat_template"] = [
                {"name": name, "template": template} for name, template in self.chat_templates.items()
            ]
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False), "utf-8"
        )

    def make_special(self, ends: Sequence[int]) -> None:
        """Makes added tokens that end an answer special, so that they are no part of its text.

        Some files call the end of a turn an added token like any other; a grammar's text would end with it.
        """
        added = self.backend.get_added_tokens_decoder()
        for token in [added[end] for end in ends if end in added and not added[end].special]:
            token.special = True
            self.backend.add_tokens([token])

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added ones; the model's vocabulary may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens by their text in the tokenizer's files, including added ones."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def added_ids(self) -> set[int]:
        """Ids of the tokens that were added to the vocabulary, such as special ones."""
        return set(self.backend.get_added_tokens_decoder())

    @property
    def has_chat_template(self) -> bool:
        """Whether texts are formatted as conversations."""
        return self.chat_template is not None or bool(self.chat_templates)

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

    @cached_property
    def special_text(self) -> SpecialText:
        """Encodes texts and conversations in which special tokens are text."""
        return SpecialText(self.backend, self.special_token_ids)

    def encode(
        self, text: str, add_special_tokens: bool = True, special_tokens_as_text: bool = False
    ) -> list[int]:
        """Token ids of a text. Special tokens written in it become their ids.

        Args:
          text: any string of valid Unicode.
          add_special_tokens: prepend the beginning-of-text token, if the model has one and the text does not
            begin with it. Pass False for the output of `apply_chat_template`, which already contains it.
          special_tokens_as_text: special tokens written in the text become ids of other tokens.

        Raises:
          CheckpointError: the text holds a lone surrogate, or the tokenizer fails, or has no other tokens for
            a special one.
        """
        _check_unicode(text)
        with foreign("text", "the tokenizer failed"):
            if special_tokens_as_text:
                return self.special_text.encode_text(text, add_special_tokens=add_special_tokens)
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self._with_one_beginning(ids) if add_special_tokens else ids

    def encode_marked(self, chat: str) -> list[int]:
        """Token ids of a conversation rendered of what `special_text.mark` gave; errors as of `encode`."""
        _check_unicode(chat)
        with foreign("text", "the tokenizer failed"):
            return self.special_text.encode(chat)

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
            raise CheckpointError(
                f"text of {len(text)} characters makes more than {max_tokens} tokens, "
                f"the max_model_len; {LONGER}"
            )

    def characters_past(self, text: str, max_tokens: int) -> int | None:
        """A number of characters with more than `max_tokens` tokens, if the text is far too long; None
        otherwise, although the text may still be somewhat too long. Errors as of `encode`.
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
        stream = TextStream(self.backend, skip_special_tokens)
        return stream.feed(ids) + stream.finish()

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text that it does not begin, also if that is part of a character.

        A special token is its name; an id without a token is nothing.
        """
        return token_bytes(self.backend, token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Renders a conversation as text with special tokens; messages and arguments as in `render_chat`.

        Args:
          continue_final_message: end within the last message, an answer of the assistant's that is to go on,
            in place of the prompt for a new one. Where the template trims it, so is its end.

        Raises:
          CheckpointError: there is no chat template or no default one, the last message cannot be continued,
            or `render_chat` fails.
        """
        template = self.chat_template
        if (arguments or {}).get("tools"):
            template = self.chat_templates.get(_FOR_TOOLS, template)
        if template is None and self.chat_templates:
            names = ", ".join(map(repr, self.chat_templates))
            raise CheckpointError(f"the model has several chat templates and no default: {names}")
        if template is None:
            raise CheckpointError("the model has no chat template: pass a plain prompt")
        if continue_final_message:
            messages = _to_be_cut(as_messages(messages))
        chat = render_chat(
            template,
            messages,
            self.special_tokens,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            arguments=arguments,
        )
        return _cut(chat) if continue_final_message else chat


def _to_be_cut(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    *before, last = messages
    if last["role"] != "assistant":
        raise CheckpointError(f"continue_final_message: the last message is of the {last['role']}, no answer")
    return [*before, {**last, "content": last["content"] + _CUT + _SPACE}]


def _cut(chat: str) -> str:
    before, found, after = chat.rpartition(_CUT)
    if not found:
        raise CheckpointError("continue_final_message: the chat template leaves out the last message")
    return before if after.startswith(_SPACE) else before.rstrip()


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"text is not valid Unicode: lone surrogate at {error.start}") from None
