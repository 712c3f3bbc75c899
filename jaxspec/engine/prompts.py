"""Prompts of every form, as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.checkpoints import Tokenizer
from jaxspec.checkpoints.chat_template import check_messages

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""A string, token ids, or chat messages of {"role", "content"}."""

_FORMS = "prompt must be a string, a list of token ids or a list of chat messages"


def is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether `prompts` is one prompt: a string, token ids or messages, and not a list of prompts."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence | np.ndarray) or not len(prompts):
        return False
    return all(isinstance(item, (int, np.integer, dict)) for item in prompts)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, of one or of several.

    Raises:
      ValueError: it is neither.
    """
    if is_one_prompt(prompts):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise ValueError(f"{_FORMS}, or a list of these, got {prompts!r}")
    return list(prompts)  # type: ignore[arg-type]


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    *,
    raw: bool,
    vocab_size: int,
    max_tokens: int | None = None,
) -> list[int]:
    """Token ids of a prompt.

    A string is a user's turn and goes through the chat template where the model has one; `raw` passes it
    as it stands. Messages need a chat template. Token ids are always raw.

    Args:
      max_tokens: what there is room for; a text far beyond it is refused before all of it is read. The ids
        may still be somewhat more.

    Raises:
      ValueError: an empty prompt, a text far too long, an id outside the vocabulary, or a form that needs
        what is not there.
    """
    if not isinstance(prompt, Sequence | np.ndarray):
        raise ValueError(f"{_FORMS}, got {prompt!r}")
    if isinstance(prompt, str):
        ids = _encode_text(prompt, tokenizer, raw=raw, max_tokens=max_tokens)
    elif len(prompt) and all(isinstance(item, dict) for item in prompt):
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ValueError("prompt: chat messages need a chat template, and this checkpoint has none")
        ids = _encode_chat(list(prompt), tokenizer, max_tokens)  # type: ignore[arg-type]
    elif all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in prompt):
        ids = [int(item) for item in prompt]  # type: ignore[arg-type]
    else:
        raise ValueError(_FORMS)
    if not ids:
        raise ValueError("prompt is empty")
    # A tokenizer's ids too: nobody has compared it with the model.
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"prompt: token id {outside[0]} is outside the vocabulary of {vocab_size}")
    return ids


def _encode_text(prompt: str, tokenizer: Tokenizer | None, *, raw: bool, max_tokens: int | None) -> list[int]:
    if tokenizer is None:
        raise ValueError("prompt: text needs a tokenizer, and this checkpoint has none; pass token ids")
    if not prompt:
        return []
    if raw or not tokenizer.has_chat_template:
        _check_length(prompt, tokenizer, max_tokens)
        return tokenizer.encode(prompt)
    return _encode_chat([{"role": "user", "content": prompt}], tokenizer, max_tokens)


def _encode_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, max_tokens: int | None
) -> list[int]:
    check_messages(messages)
    for message in messages:
        _check_length(message["content"], tokenizer, max_tokens)
    chat = tokenizer.apply_chat_template(messages)
    _check_length(chat, tokenizer, max_tokens)
    return tokenizer.encode(chat, add_special_tokens=False)


def _check_length(text: str, tokenizer: Tokenizer, max_tokens: int | None) -> None:
    if max_tokens is not None:
        tokenizer.check_length(text, max_tokens)
