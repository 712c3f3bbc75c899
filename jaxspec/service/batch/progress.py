"""The progress of a run."""

from collections.abc import Iterator

from jaxspec.engine import AcceptanceStats, Generation
from jaxspec.service.batch.answer import Answer
from jaxspec.service.rows import RowError


class Progress:
    """Counters of a run, and the order in which it yields rows.

    Attributes:
      num_tokens: tokens of the finished generations.
      num_prompt_tokens: tokens of their prompts; the prompt of a turn includes the turns before it.
      stats: acceptance statistics of the finished generations.
    """

    def __init__(self, *, keep_order: bool):
        self._keep_order = keep_order
        self._done: dict[int, Answer | RowError] = {}
        self._num_yielded = 0
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.stats = AcceptanceStats()

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
