"""JSONL files of prompts, with or without answers."""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxspec.checkpoints import CheckpointError, Tokenizer
from jaxspec.config import ConfigError
from jaxspec.training.held_out import normalise

Message = dict[str, str]
_NEEDS = 'needs a text "prompt", a list of texts "turns" or a list of messages "messages"'

_ENCODED_AT_ONCE = 1024


@dataclass(frozen=True)
class PromptRow:
    """One row of a file.

    Attributes:
      messages: the conversation, ending with the user's turn to answer.
      answer: the row's answer, or None.
      where: the file and the line, for messages.
    """

    messages: tuple[Message, ...]
    answer: str | None = None
    where: str = field(default="prompt", compare=False)

    @property
    def key(self) -> str:
        """Equal in rows of one prompt: all messages in lower case, without marks between words."""
        text = "\n".join(message["content"] for message in self.messages).lower()
        return re.sub(r"[\s.,:;!?'\"]+", " ", text).strip() or text

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


def read_rows(path: Path) -> list[PromptRow]:
    """The rows of a JSONL file. Each is an object with one of

    - "prompt", a text, and optionally "response", its answer;
    - "turns", a list of the user's turns, of which the first is used;
    - "messages", each with "role" and "content"; if the last is the assistant's, it is the answer.

    Raises:
      ConfigError: the file cannot be read, or a row has another form.
    """
    return [_prompt_row(row, where) for row, where in _objects(path)]


def read_texts(path: Path) -> list[str]:
    """All turns of the user in a file; otherwise like `read_rows`."""
    texts: list[str] = []
    for row, where in _objects(path):
        checked = _prompt_row(row, where)  # which keeps only the first of "turns"
        texts += checked.user_turns if "messages" in row else row.get("turns", checked.user_turns)
    return texts


def encode_prompts(tokenizer: Tokenizer, rows: Sequence[PromptRow]) -> Iterator[list[int]]:
    """Token ids of each row's conversation up to the assistant's turn, encoded on all cores.

    Raises:
      ConfigError: the chat template refuses a row.
    """
    for start in range(0, len(rows), _ENCODED_AT_ONCE):
        texts = []
        for row in rows[start : start + _ENCODED_AT_ONCE]:
            with row.named():
                texts.append(tokenizer.apply_chat_template(row.messages))
        yield from tokenizer.encode_all(texts, add_special_tokens=False)


def encode_fitting(
    tokenizer: Tokenizer, path: Path, *, positions: int, max_new_tokens: int, limit: int | None = None
) -> list[list[int]]:
    """Token ids of a file's prompts that leave room for an answer; of the first `limit` rows, if given.

    Raises:
      ConfigError: the file is malformed, or no prompt leaves room.
    """
    encoded = encode_prompts(tokenizer, read_rows(path)[:limit])
    fitting = [ids for ids in encoded if len(ids) + max_new_tokens <= positions]
    if not fitting:
        raise ConfigError(f"{path}: no prompt leaves room for {max_new_tokens} new tokens")
    return fitting


def encode_answer(tokenizer: Tokenizer, row: PromptRow, ends: Collection[int] = ()) -> list[int]:
    """Token ids of a row's answer, as the target would generate it, including the end token.

    Args:
      tokenizer: the target's.
      row: a row with an answer.
      ends: tokens that end an answer, besides those that the tokenizer's files name.

    Raises:
      ConfigError: the chat template refuses the row.
    """
    assert row.answer is not None
    with row.named():
        before = tokenizer.apply_chat_template(row.messages)
        whole = tokenizer.apply_chat_template(
            [*row.messages, {"role": "assistant", "content": row.answer}], add_generation_prompt=False
        )
    # Some templates render past turns differently from the current one; then only the text is used.
    text = whole[len(before) :] if whole.startswith(before) else row.answer
    tokens = tokenizer.encode(text, add_special_tokens=False)
    ends = {*tokenizer.eos_token_ids, *ends}
    length = next((i for i, token in enumerate(tokens, 1) if token in ends), None)
    return [*tokens, *tokenizer.eos_token_ids[:1]] if length is None else tokens[:length]


def _objects(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a file of prompts: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise ConfigError(f"{where}: not a JSON object") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: {_NEEDS}")
            yield row, where


def _prompt_row(row: dict[str, Any], where: str) -> PromptRow:
    found = _conversation(row["messages"], where) if "messages" in row else _single_turn(row, where)
    texts = [text for message in found.messages for text in message.values()]
    try:
        "".join([*texts, found.answer or ""]).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: not valid Unicode: a lone surrogate in a text") from None
    return replace(found, where=where)


def _single_turn(row: dict[str, Any], where: str) -> PromptRow:
    turns, answer = row.get("turns", [row.get("prompt")]), row.get("response")
    if not isinstance(turns, list) or not turns or not all(map(_is_text, turns)):
        raise ConfigError(f"{where}: {_NEEDS}")
    if answer is not None and not _is_text(answer):
        raise ConfigError(f'{where}: "response" must be a text')
    return PromptRow(({"role": "user", "content": turns[0]},), answer)


def _conversation(messages: Any, where: str) -> PromptRow:
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ConfigError(f'{where}: every one of "messages" needs a text "role" and a text "content"')
    kept = [{"role": message["role"], "content": message["content"]} for message in messages]
    answer = kept.pop()["content"] if kept and kept[-1]["role"] == "assistant" else None
    if not kept or kept[-1]["role"] != "user":
        raise ConfigError(f'{where}: "messages" must end with a user\'s turn, or with its answer')
    return PromptRow(tuple(kept), answer)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(_is_text(message.get(key)) for key in ("role", "content"))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
