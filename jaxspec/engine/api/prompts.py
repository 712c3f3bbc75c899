"""Turns prompts of every form into token ids."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.documents import plain_number
from jaxspec.files import Tokenizer
from jaxspec.files.text.chat_template import check_arguments
from jaxspec.files.text.messages import as_messages

Prompt = str | Sequence[int] | np.ndarray | jax.Array | Sequence[dict[str, Any]]
"""A string, token ids (an array has one dimension), or chat messages, as `as_messages` reads them."""

_FORMS = "prompt must be a string, a list of token ids or a list of chat messages"


def is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether `prompts` is one prompt (a string, token ids or messages) and not a list of prompts."""
    return _is_one(_without_arrays(prompts))


def _is_one(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not _is_list(prompts) or not len(prompts):
        return False
    return all(issubclass(kind, (int, np.integer, dict)) for kind in _kinds(prompts))


def _is_list(prompts: Any) -> bool:
    """Whether it has items; bytes are text, not ids."""
    return isinstance(prompts, Sequence) and not isinstance(prompts, bytes | bytearray | memoryview)


def _without_arrays(prompts: Any) -> Any:
    """Arrays, of NumPy or JAX for example, as lists; also those in a list, which may be single numbers."""
    if _is_array(type(prompts)):
        return np.asarray(prompts).tolist()
    if isinstance(prompts, list | tuple) and any(map(_is_array, _kinds(prompts))):
        return [_without_arrays(item) for item in prompts]
    return prompts


def _is_array(kind: type) -> bool:
    return hasattr(kind, "__array__") and not issubclass(kind, np.generic)


def _kinds(items: Iterable[Any]) -> set[type]:
    """The types among the items. Checking these takes a fraction of the time of checking each item."""
    return set(map(type, items))


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list.

    Raises:
      ValueError: `prompts` is neither.
    """
    given = _without_arrays(prompts)
    if _is_one(given):
        return [given]
    if not _is_list(given):
        raise ValueError(f"{_FORMS}, or a list of these, got {given!r}")
    return list(given)


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_tokens: int,
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    special_tokens_as_text: bool = False,
) -> list[int]:
    """Token ids of a prompt.

    A string is a user's turn and goes through the model's chat template if it has one. Messages need a chat
    template. Token ids are used unchanged.

    Args:
      max_tokens: a text that is clearly longer is refused before all of it is tokenised; the ids of others
        may still be more than this.
      raw: tokenise a string as it is, without the chat template. It may begin with the beginning-of-text
        token or not; there is one in the ids.
      chat_template_kwargs: arguments of the chat template.
      continue_final_message: the last message is the beginning of the answer; the ids end with it.
      special_tokens_as_text: special tokens in texts, messages and arguments of the template are text; only
        the template's own are tokens.

    Raises:
      ValueError: the prompt is empty, far too long, has an id outside the vocabulary, or needs a tokenizer
        or a chat template that is missing; or an option is given where it has no effect.
    """
    arguments = check_arguments(chat_template_kwargs)
    for name, flag in (
        ("continue_final_message", continue_final_message),
        ("special_tokens_as_text", special_tokens_as_text),
    ):
        if not isinstance(plain_number(flag), bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")
    prompt = _without_arrays(prompt)
    if not _is_list(prompt):
        raise ValueError(f"{_FORMS}, got {prompt!r}")
    kinds = set() if isinstance(prompt, str) else _kinds(prompt)
    is_messages = bool(kinds) and all(issubclass(kind, dict) for kind in kinds)
    if continue_final_message and not is_messages:
        raise ValueError("continue_final_message: only chat messages end with an answer that can go on")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("prompt: text needs a tokenizer, and this checkpoint has none; pass token ids")
        if not prompt:
            ids = []
        elif raw or not tokenizer.has_chat_template:
            _refuse(arguments, "raw text" if raw else "text, as this checkpoint has none")
            tokenizer.check_length(prompt, max_tokens)
            ids = tokenizer.encode(prompt, special_tokens_as_text=special_tokens_as_text)
        else:
            chat = _Chat([{"role": "user", "content": prompt}], arguments, False, special_tokens_as_text)
            ids = chat.encode(tokenizer, max_tokens)
    elif is_messages:
        if tokenizer is None or not tokenizer.has_chat_template:
            raise ValueError("prompt: chat messages need a chat template, and this checkpoint has none")
        if raw:
            raise ValueError("raw: chat messages are text only by the chat template")
        chat = _Chat(as_messages(prompt), arguments, continue_final_message, special_tokens_as_text)
        ids = chat.encode(tokenizer, max_tokens)
    elif all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
        _refuse(arguments, "token ids")
        if special_tokens_as_text:
            raise ValueError("special_tokens_as_text: token ids are no text")
        # Most are ints already, and to convert them takes as long as all checks together.
        ids = list(prompt if kinds == {int} else map(int, prompt))  # type: ignore[arg-type]
    else:
        raise ValueError(_FORMS)
    if not ids:
        raise ValueError("prompt is empty")
    # A tokenizer's ids are checked too, as its vocabulary may be larger than the model's.
    if min(ids) < 0 or max(ids) >= vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(f"prompt: token id {outside} is outside the vocabulary of {vocab_size}")
    return ids


class _Chat(NamedTuple):
    """A conversation; the other fields are as in `encode_prompt`."""

    messages: list[dict[str, Any]]
    arguments: dict[str, Any]
    continue_final_message: bool
    special_tokens_as_text: bool

    def encode(self, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
        tokenizer.check_length("".join(message["content"] for message in self.messages), max_tokens)
        messages, arguments = self.messages, self.arguments
        if self.special_tokens_as_text:
            try:
                messages, arguments = tokenizer.special_text.mark([messages, arguments])
            except RecursionError:
                raise ValueError("prompt: messages and chat_template_kwargs are nested too deeply") from None
        chat = tokenizer.apply_chat_template(
            messages, arguments=arguments, continue_final_message=self.continue_final_message
        )
        tokenizer.check_length(chat, max_tokens)
        if self.special_tokens_as_text:
            return tokenizer.encode_marked(chat)
        return tokenizer.encode(chat, add_special_tokens=False)


def _refuse(arguments: Mapping[str, Any], what: str) -> None:
    """Refuses arguments of a chat template where none applies."""
    if arguments:
        raise ValueError(f"chat_template_kwargs: no chat template applies to {what}")
