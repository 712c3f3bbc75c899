"""The progress of a run."""

from collections.abc import Iterable, Iterator

from jaxspec.engine import AcceptanceStats, Generation
from jaxspec.service.batch.answer import Answer
from jaxspec.service.batch.read_ahead import ReadAhead
from jaxspec.service.rows import Row, RowError

LOOK_AHEAD = 16
"""With `keep_order`, how far rows may be read ahead of the first unanswered one, in units of
`Engine.max_pending`."""


class Progress:
    """How a run reads rows, counts answers and orders what it yields.

    Attributes:
      num_tokens: tokens of the finished generations.
      num_prompt_tokens: tokens of their prompts; the prompt of a turn includes the turns before it.
      stats: acceptance statistics of the finished generations.
    """

    _source: ReadAhead[Row | RowError]
    _look_ahead: int

    def __init__(self, rows: Iterable[Row | RowError], *, keep_order: bool):
        self._rows = rows
        self._keep_order = keep_order
        self._done: dict[int, Answer | RowError] = {}
        self._num_read = self._num_yielded = 0
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.stats = AcceptanceStats()

    def _next_row(self, *, may_wait: bool) -> tuple[int, Row] | None:
        """The next row with its number; None if there is none now, or too many are read ahead.

        Malformed rows are passed over, as done. It waits for a row only if it may and none is done.
        """
        while self._num_read - self._num_yielded < self._look_ahead:
            row = self._source.take(wait=may_wait and not self._done)
            if row is None:
                return None
            self._num_read += 1
            if isinstance(row, Row):
                return self._num_read - 1, row
            self._done[self._num_read - 1] = row
        return None

    def _count(self, generation: Generation) -> None:
        self.num_tokens += len(generation.token_ids)
        self.num_prompt_tokens += len(generation.prompt_token_ids)
        self.stats.add(generation.stats)

    def _ended(self) -> Iterator[Answer | RowError]:
        """The rows that may be yielded now, taken from `_done`, a dict by row number."""
        while self._done:
            index = self._num_yielded if self._keep_order else next(iter(self._done))
            if index not in self._done:
                return
            self._num_yielded += 1
            yield self._done.pop(index)
