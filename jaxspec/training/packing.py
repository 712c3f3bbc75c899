"""Conversations packed into rows of one length, and the loader over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from jaxspec.training.token_rows import TokenRows

_OPEN_ROWS = 64  # rows that may still take a conversation; more fill better and search longer


@dataclass(frozen=True)
class Conversations:
    """Prompts and their answers, end to end.

    Attributes:
      tokens: i32[total].
      start: i64[n + 1], where each conversation begins.
      prompt_length: i32[n].
    """

    tokens: np.ndarray
    start: np.ndarray
    prompt_length: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_length)


def join_answers(prompts: TokenRows, answers: TokenRows) -> Conversations:
    """Every answer behind its prompt; answer i belongs to prompt i modulo their number."""
    sequences, prompt = prompts.sequences(), answers.index % len(prompts)
    pieces = [
        np.concatenate([sequences[index], answer])
        for index, answer in zip(prompt, answers.sequences(), strict=True)
    ]
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    return Conversations(
        np.concatenate(pieces), np.concatenate([[0], np.cumsum(lengths)]), prompts.length[prompt]
    )


def pack(lengths: np.ndarray, row_length: int, seed: int) -> list[list[int]]:
    """Which conversations share a row: first fit, in a random order.

    Args:
      lengths: of the conversations; one longer than a row gets a row of its own and is cut.
    """
    rows: list[list[int]] = []
    room: dict[int, int] = {}  # of the rows still open, oldest first
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
    """Random access to packed rows, as `grain.MapDataset.source` takes it.

    A row is {"tokens", "positions", "segments": i32[S], "answer": bool[S]}; segments count from 1, and 0
    is padding.
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


def training_batches(source: PackedSource, *, batch_size: int, seed: int) -> Any:
    """An endless iterator over shuffled batches, with `get_state` and `set_state`; new order every epoch."""
    rows = grain.MapDataset.source(source).shuffle(seed=seed).repeat(None)
    batches = rows.batch(batch_size, drop_remainder=True)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))
