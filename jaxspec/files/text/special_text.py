"""Special tokens that somebody wrote in a text, told from those that the chat template puts beside it."""

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from jaxspec.files.errors import CheckpointError

_MARK = "\ufdd0"
"""Never a character, by Unicode: it stands only in marked texts, until they become tokens."""


class SpecialText:
    """Encodes conversations whose texts may hold special tokens as text.

    `mark` puts a mark into every special token of a text, and into what could become one together with what
    the template puts beside it. The marked text goes through the template, whose own special tokens have no
    mark; `encode` takes these as tokens and what is marked as text.
    """

    def __init__(self, backend: Tokenizer, special: Mapping[str, int]):
        """Prepares a copy of the tokenizer.

        Args:
          backend: the tokenizer.
          special: its special tokens, with their ids.
        """
        self._backend, self._special = backend, special
        self._text_backend = Tokenizer.from_str(backend.to_str())
        self._text_backend.encode_special_tokens = True
        # Put before a text that does not begin the prompt; some tokenizers begin the first text with a space.
        self._text_backend.add_tokens([AddedToken(_MARK, normalized=False)])
        any_of = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) or "(?!)"
        self._token, self._anywhere = re.compile(f"({any_of})"), re.compile(f"(?={any_of})")
        self._begins = {token[:size] for token in special for size in range(1, len(token))}
        self._ends = {token[size:] for token in special for size in range(1, len(token))}
        self._ids = set(special.values())
        self._longest = max(map(len, special), default=0)

    def mark(self, value: Any) -> Any:
        """A JSON value with its texts marked, keys included.

        Raises:
          CheckpointError: a text holds the mark itself.
        """
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(each) for key, each in value.items()}
        return [*map(self.mark, value)] if isinstance(value, list | tuple) else value

    def _marked(self, text: str) -> str:
        if _MARK in text:
            raise CheckpointError(f"text has U+{ord(_MARK):X}, which is no character")
        places = {found.start() + 1 for found in self._anywhere.finditer(text)}
        for size in range(1, min(self._longest, len(text) + 1)):
            if text[-size:] in self._begins:
                places.add(len(text) - size + 1)
            if text[:size] in self._ends:
                places.add(size - 1)
        # Words inside a token, such as the role in "<|user|>", are what templates compare with.
        is_inside = 0 < len(text) < self._longest and any(text in token for token in self._special)
        if is_inside and not text.isalnum():
            places.add(1)
        for place in sorted(places, reverse=True):
            text = text[:place] + _MARK + text[place:]
        return text

    def encode(self, chat: str) -> list[int]:
        """Token ids of a rendered conversation of marked texts.

        Raises:
          CheckpointError: the tokenizer has no other tokens for the text of a special one.
        """
        ids: list[int] = []
        plain = ""
        texts_and_tokens = [*self._token.split(chat), ""]
        for text, token in zip(texts_and_tokens[::2], texts_and_tokens[1::2], strict=True):
            if _MARK not in text:
                plain += text + token
                continue
            is_first = not ids and not plain
            ids += self._backend.encode(plain, add_special_tokens=False).ids
            ids += self.encode_text(text.replace(_MARK, ""), is_first=is_first)
            plain = token
        return ids + self._backend.encode(plain, add_special_tokens=False).ids

    def encode_text(self, text: str, *, is_first: bool = True, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text without special tokens.

        Args:
          text: any string of valid Unicode.
          is_first: whether it begins the prompt.
          add_special_tokens: as in `Tokenizer.encode`.

        Raises:
          CheckpointError: as `encode`.
        """
        encoded = self._text_backend.encode(text if is_first else _MARK + text, add_special_tokens=False)
        taken = self._ids.intersection(encoded.ids)
        if taken:
            token = next(token for token, id in self._special.items() if id in taken)
            raise CheckpointError(f"special_tokens_as_text: this tokenizer has no other tokens for {token!r}")
        if not is_first:
            return encoded.ids[1:]
        return self._text_backend.post_process(encoded).ids if add_special_tokens else encoded.ids
