"""Packing conversations into rows of equal length, and the data loader."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.installation import needs
from jaxspec.lab.training.token_rows import TokenRows

with needs("train"):
    import grain

_OPEN_ROWS = 64
"""Rows that can still take a conversation; more rows waste less space and take longer to search."""


@dataclass(frozen=True)
class Conversations:
    """Prompts with their answers, concatenated.

    Attributes:
      tokens: i32[total], all tokens.
      start: i64[n + 1], the first token of each conversation, and the total.
      prompt_length: i32[n], tokens of each prompt.
    """

    tokens: np.ndarray
    start: np.ndarray
    prompt_length: np.ndarray

    @classmethod
    def of(cls, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> "Conversations":
        """Conversations of pairs of the token ids of a prompt and of its answer."""
        pairs = list(pairs)
        pieces = [np.asarray([*prompt, *answer], np.int32) for prompt, answer in pairs]
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        prompt_length = np.array([len(prompt) for prompt, _ in pairs], np.int32)
        return cls(
            np.concatenate([np.zeros(0, np.int32), *pieces]), np.concatenate([[0], ends]), prompt_length
        )

    def __len__(self) -> int:
        return len(self.prompt_length)


def join_answers(prompts: TokenRows, answers: TokenRows, *, longest: int) -> Conversations:
    """Joins every answer to its prompt; answer i belongs to prompt i modulo the number of prompts.

    Args:
      prompts, answers: token ids.
      longest: the target's number of positions; what a conversation has past it is cut off. Only answers that
        came with their prompts are so long.
    """
    sequences, prompt = prompts.sequences(), answers.index % len(prompts)
    pieces = [
        np.concatenate([sequences[index], answer])[:longest]
        for index, answer in zip(prompt, answers.sequences(), strict=True)
    ]
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    return Conversations(
        np.concatenate(pieces), np.concatenate([[0], np.cumsum(lengths)]), prompts.length[prompt]
    )


def pack(lengths: np.ndarray, row_length: int, seed: int) -> list[list[int]]:
    """The conversations of each row, by first fit in a random order.

    Args:
      lengths: tokens of each conversation. One that is longer than a row gets its own row and is cut.
      row_length: tokens per row.
      seed: seed of the order.
    """
    rows: list[list[int]] = []
    room: dict[int, int] = {}  # free tokens of the rows still open, oldest first
    for conversation in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        length = min(int(lengths[conversation]), row_length)
        row = next((row for row, left in room.items() if left >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room[row] = row_length
            if len(room) > _OPEN_ROWS:
                del room[next(iter(room))]
        rows[row].append(conversation)
        room[row] -= length
    return rows


class PackedSource:
    """Random access to packed rows, for `grain.MapDataset.source`.

    A row is {"tokens", "positions", "segments": i32[S], "answer": bool[S]}; see `PackedRows`.
    """

    def __init__(self, conversations: Conversations, rows: Sequence[Sequence[int]], row_length: int):
        self._conversations, self._rows, self._row_length = conversations, rows, row_length

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        data = self._conversations
        tokens, positions, segments = np.zeros((3, self._row_length), np.int32)
        answer = np.zeros(self._row_length, bool)
        begin = 0
        for segment, conversation in enumerate(self._rows[row], 1):
            start = data.start[conversation]
            length = min(int(data.start[conversation + 1] - start), self._row_length - begin)
            place = slice(begin, begin + length)
            tokens[place] = data.tokens[start : start + length]
            positions[place] = np.arange(length)
            segments[place] = segment
            answer[place] = np.arange(length) >= data.prompt_length[conversation]
            begin += length
        return {"tokens": tokens, "positions": positions, "segments": segments, "answer": answer}

    def padded_batches(self, batch_size: int) -> list[dict[str, np.ndarray]]:
        """All rows in batches, the last one filled with padding; only one shape is compiled."""
        rows = [self[i] for i in range(len(self))]
        if rows:
            padding = {name: np.zeros_like(values) for name, values in rows[0].items()}
            rows += [padding] * (-len(rows) % batch_size)
        batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        return [{name: np.stack([row[name] for row in batch]) for name in batch[0]} for batch in batches]


def training_batches(source: PackedSource, *, batch_size: int, seed: int) -> Any:
    """An endless iterator over batches, shuffled anew every epoch, with `get_state` and `set_state`."""
    rows = grain.MapDataset.source(source).shuffle(seed=seed).repeat(None)
    batches = rows.batch(batch_size, drop_remainder=True)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))
