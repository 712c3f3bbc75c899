"""Token sequences of different lengths, in memory and in shard files."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspec.lab.training.stage_folder import write_atomically


@dataclass(frozen=True)
class TokenRows:
    """Concatenated sequences.

    Attributes:
      index: i32[n], the index of each sequence's prompt.
      length: i32[n], tokens of each sequence.
      stopped: bool[n], whether it ended with an end-of-sequence token rather than at a limit.
      tokens: i32[sum of length], all tokens.
    """

    index: np.ndarray
    length: np.ndarray
    stopped: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Sequence[int] | np.ndarray, bool]]) -> "TokenRows":
        """Makes rows from triples (index, token ids, stopped)."""
        rows = list(rows)
        arrays = [np.asarray(tokens, np.int32) for _, tokens, _ in rows]
        return cls(
            np.array([index for index, _, _ in rows], np.int32),
            np.array([len(tokens) for tokens in arrays], np.int32),
            np.array([stopped for _, _, stopped in rows], bool),
            np.concatenate([np.zeros(0, np.int32), *arrays]),
        )

    def __len__(self) -> int:
        return len(self.index)

    def sequences(self) -> list[np.ndarray]:
        """The tokens of each sequence."""
        return np.split(self.tokens, np.cumsum(self.length)[:-1]) if len(self) else []

    def rows(self) -> list[tuple[int, np.ndarray, bool]]:
        """The triples (index, tokens, stopped): the inverse of `of`."""
        return list(zip(self.index.tolist(), self.sequences(), self.stopped.tolist(), strict=True))

    def save(self, path: Path) -> None:
        """Writes an .npz file atomically."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer, index=self.index, length=self.length, stopped=self.stopped, tokens=self.tokens
        )
        write_atomically(path, buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> "TokenRows":
        with np.load(path, allow_pickle=False) as file:
            return cls(file["index"], file["length"], file["stopped"], file["tokens"])


def read_shards(folder: Path) -> TokenRows:
    """All shards of a folder together, sorted by index; incomplete files are ignored.

    A row is in two shards if Ctrl-C came right after the first was written; it counts once.
    """
    shards = [TokenRows.load(path) for path in sorted(folder.glob("shard-*.npz"))]
    rows = {row[0]: row for shard in shards for row in shard.rows()}
    return TokenRows.of(rows[index] for index in sorted(rows))


def next_shard(folder: Path) -> Path:
    """The path of the next shard to write."""
    numbers = [int(path.stem.removeprefix("shard-")) for path in folder.glob("shard-*.npz")]
    return folder / f"shard-{max(numbers, default=-1) + 1:05}.npz"
