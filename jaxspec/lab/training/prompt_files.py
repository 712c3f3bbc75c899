"""Rows of files as training reads them: conversations, with or without an answer."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxspec.config import ConfigError
from jaxspec.files import CheckpointError, Tokenizer
from jaxspec.lab.training.held_out import normalise
from jaxspec.service.rows import InputError, Row, RowError
from jaxspec.service.rows import read_rows as read_file

Message = Mapping[str, Any]

_ENCODED_AT_ONCE = 1024


@dataclass(frozen=True)
class PromptRow:
    """One row of a file.

    Attributes:
      messages: the conversation up to the assistant's turn.
      answer: the row's answer, or None.
      chat_template_kwargs: arguments of the chat template.
      where: the file and the line, for messages.
    """

    messages: tuple[Message, ...]
    answer: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="prompt", compare=False)

    @property
    def key(self) -> str:
        """Equal in rows of one prompt: all messages in lower case, without marks between words."""
        text = "\n".join(message["content"] for message in self.messages).lower()
        text = re.sub(r"[\s.,:;!?'\"]+", " ", text).strip() or text
        if self.chat_template_kwargs:
            text += "\n" + json.dumps(self.chat_template_kwargs, sort_keys=True)
        return text

    @property
    def user_turns(self) -> tuple[str, ...]:
        return tuple(message["content"] for message in self.messages if message["role"] == "user")

    @property
    def words(self) -> tuple[str, ...]:
        """The words of all messages."""
        return normalise("\n".join(message["content"] for message in self.messages))

    @property
    def place(self) -> float:
        """A number in [0, 1) from a hash of the words: the same order in every run and file."""
        digest = hashlib.sha256(" ".join(self.words).encode()).digest()
        return int.from_bytes(digest[:7], "big") / 2**56

    @contextmanager
    def named(self) -> Iterator[None]:
        """Names the row in the error of a chat template that refuses it."""
        try:
            yield
        except CheckpointError as error:
            raise ConfigError(f"{self.where}: {error}") from None


def read_rows(path: Path, *, first_turns: bool = False) -> list[PromptRow]:
    """The rows of a JSONL file, of the format of `jaxspec.service.rows.read_rows`.

    A row's answer is its own ("response", "completion" or "answer"), or the last of its messages if that is
    the assistant's. It cannot set how the target samples: the run does.

    Args:
      path: the file.
      first_turns: of rows with several "turns", which nobody has answered yet, take the first. Otherwise they
        are an error.

    Raises:
      ConfigError: the file cannot be read, or a row has another form or asks for what training cannot do.
    """
    return [_prompt_row(row, first_turns=first_turns) for row in _rows(path)]


def read_texts(path: Path) -> list[str]:
    """All turns of the user in a file; errors as of `read_rows`."""
    texts: list[str] = []
    for row in _rows(path):
        texts += row.turns or _prompt_row(row, first_turns=True).user_turns
    return texts


def _rows(path: Path) -> Iterator[Row]:
    try:
        for row in read_file(path, unique_ids=False):
            if isinstance(row, RowError):
                raise ConfigError(row)
            yield row
    except InputError as error:
        raise ConfigError(error) from None


def _prompt_row(row: Row, *, first_turns: bool) -> PromptRow:
    for key in (*row.sampling, *(["n"] if row.n is not None else [])):
        raise ConfigError(f"{row.place}: {key}: a training run samples every row alike; leave it out")
    for key in row.flags:
        raise ConfigError(f"{row.place}: {key}: a training run does not take it from a row; leave it out")
    if len(row.turns) > 1 and not first_turns:
        raise ConfigError(
            f"{row.place}: turns: training needs the answers between them; give them as messages"
        )
    prompt = row.turns[0] if row.prompt is None else row.prompt
    messages: list[Message] = []
    answer = row.answer
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    else:
        for message in prompt:
            if not isinstance(message, Mapping):
                raise ConfigError(f"{row.place}: prompt must be text: training goes by words")
            messages.append(message)
        if messages[-1]["role"] == "assistant":
            if answer is not None:
                raise ConfigError(f"{row.place}: has two answers, the last message and its own")
            answer = messages.pop()["content"]
            if not answer:
                raise ConfigError(f"{row.place}: the answer, its last message, is empty")
    if not messages or messages[-1]["role"] not in ("user", "tool", "function"):
        raise ConfigError(f'{row.place}: "messages" must end with a user\'s turn, or with its answer')
    return PromptRow(tuple(messages), answer, row.chat_template_kwargs, row.place)


def encode_prompts(
    tokenizer: Tokenizer, rows: Sequence[PromptRow], most: int
) -> Iterator[tuple[PromptRow, list[int]]]:
    """Yields the rows of at most `most` tokens up to the assistant's turn, with these, encoded on all cores.

    Raises:
      ConfigError: the chat template refuses a row.
    """
    for start in range(0, len(rows), _ENCODED_AT_ONCE):
        read: list[PromptRow] = []
        texts: list[str] = []
        for row in rows[start : start + _ENCODED_AT_ONCE]:
            with row.named():
                text = tokenizer.apply_chat_template(row.messages, arguments=row.chat_template_kwargs)
            if tokenizer.characters_past(text, most) is None:
                read.append(row)
                texts.append(text)
        for row, ids in zip(read, tokenizer.encode_all(texts, add_special_tokens=False), strict=True):
            if len(ids) <= most:
                yield row, ids


def encode_fitting(
    tokenizer: Tokenizer, path: Path, *, positions: int, max_new_tokens: int, limit: int | None = None
) -> list[list[int]]:
    """Token ids of a file's prompts that leave room for an answer; of the first `limit` rows, if given.

    Of a row with several turns, the first is the prompt.

    Raises:
      ConfigError: the file is malformed, or no prompt leaves room.
    """
    rows = read_rows(path, first_turns=True)[:limit]
    fitting = [ids for _, ids in encode_prompts(tokenizer, rows, positions - max_new_tokens)]
    if not fitting:
        raise ConfigError(f"{path}: no prompt leaves room for {max_new_tokens} new tokens")
    return fitting


def encode_answer(tokenizer: Tokenizer, row: PromptRow, most: int, ends: Sequence[int] = ()) -> list[int]:
    """Token ids of a row's answer, as the target would generate it, including the end token.

    Args:
      tokenizer: the target's.
      row: a row with an answer.
      most: an answer that is clearly longer is not encoded to its end.
      ends: tokens that end an answer, besides those that the tokenizer's files name. The first of all is put
        where the template puts none.

    Raises:
      ConfigError: the chat template refuses the row.
    """
    assert row.answer is not None
    with row.named():
        before = tokenizer.apply_chat_template(row.messages, arguments=row.chat_template_kwargs)
        whole = tokenizer.apply_chat_template(
            [*row.messages, {"role": "assistant", "content": row.answer}],
            add_generation_prompt=False,
            arguments=row.chat_template_kwargs,
        )
    # Some templates render past turns differently from the current one; then only the text is used.
    text = whole[len(before) :] if whole.startswith(before) else row.answer
    text = text[: tokenizer.characters_past(text, most)]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    ends = (*tokenizer.eos_token_ids, *ends)
    length = next((i for i, token in enumerate(tokens, 1) if token in ends), None)
    return [*tokens, *ends[:1]] if length is None else tokens[:length]
