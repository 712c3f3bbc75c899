"""Rows through an engine."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from jaxspec.batch.rows import Row, RowError
from jaxspec.engine import AcceptanceStats, Engine, Generation
from jaxspec.engine.request import Request
from jaxspec.sampling import SamplingParams


@dataclass(frozen=True)
class Answer:
    """A finished row: one generation, or one for each of its turns."""

    row: Row
    generations: list[Generation]

    @property
    def stats(self) -> AcceptanceStats:
        """The statistics of all turns together."""
        return _total(generation.stats for generation in self.generations)

    def as_dict(self) -> dict[str, Any]:
        """The output row: the last turn's answer; for a row with turns every turn's too, under "turns"."""
        record = {"id": self.row.id, **_record(self.generations[-1]), "stats": self.stats.as_dict()}
        if self.row.turns:
            record["turns"] = [_record(generation) for generation in self.generations]
        return record


class BatchRun:
    """Rows on their way through an engine, read only as slots come free.

    Row `number` is sampled with the seed `params.seed + number`: no two rows share draws, and a row gives
    the same answer whichever others are left to do.

    Attributes:
      num_tokens: generated so far, unfinished answers included.
      num_prompt_tokens: of the requests so far; a turn reads the turns before it again.
      stats: what became of the drafts so far.
    """

    def __init__(self, engine: Engine, rows: Iterable[Row], params: SamplingParams, *, raw: bool = False):
        """Prepares a run; iterating it does the work.

        Args:
          params: of every row, apart from the seed, which counts up from this one (None is 0).
          raw: pass prompts that are text without the chat template.
        """
        self._engine = engine
        self._rows = iter(rows)
        self._params = params
        self._raw = raw
        self._running: dict[Request, Answer] = {}
        self._ended: SimpleQueue[Request] = SimpleQueue()
        self._ended_tokens = 0
        self._ended_stats = AcceptanceStats()
        self.num_prompt_tokens = 0

    def __iter__(self) -> Iterator[list[Answer | RowError]]:
        """Yields rows as they end, and nothing now and then, so that progress can be shown.

        A row that cannot be asked (its prompt is too long, say) comes as its error. Closing the iterator
        drops the unfinished rows.
        """
        try:
            while True:
                done: list[Answer | RowError] = []
                while len(self._running) < self._engine.max_pending:
                    row = next(self._rows, None)
                    if row is None:
                        break
                    done += self._ask(Answer(row, []))
                if self._running:
                    with suppress(Empty):
                        done += self._take(self._ended.get(timeout=0.2))
                elif not done:
                    return
                yield done
        finally:
            self._engine.abort(*self._running)

    @property
    def num_tokens(self) -> int:
        return self._ended_tokens + sum(len(request.token_ids) for request in self._running)

    @property
    def stats(self) -> AcceptanceStats:
        return _total([self._ended_stats, *(request.stats for request in self._running)])

    def _take(self, request: Request) -> list[Answer | RowError]:
        """Moves a finished request into its row's answer; goes on with the row's next turn, if any."""
        answer = self._running.pop(request)
        generation = request.generation()
        self._ended_tokens += len(generation.token_ids)
        self._ended_stats.add(generation.stats)
        answer = Answer(answer.row, [*answer.generations, generation])
        if len(answer.generations) >= len(answer.row.turns):
            return [answer]
        return self._ask(answer)

    def _ask(self, answer: Answer) -> list[Answer | RowError]:
        """Queues the next request of a row; returns the error that stands in the way, if any."""
        row = answer.row
        seed = ((self._params.seed or 0) + row.number) % 2**64
        try:
            request = self._engine.make_request(
                _next_prompt(answer), replace(self._params, seed=seed), raw=self._raw
            )
        except ValueError as error:
            turn = f"turn {len(answer.generations) + 1}: " if row.turns else ""
            return [RowError(row.line, f"{turn}{error}")]
        self._running[request] = answer
        self._engine.submit([request], lambda request: lambda delta: self._ended.put(request))
        self.num_prompt_tokens += len(request.prompt)
        return []


def _next_prompt(answer: Answer) -> Any:
    row = answer.row
    if row.prompt is not None:
        return row.prompt
    messages = []
    for turn, generation in zip(row.turns, answer.generations, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": generation.text}]
    return [*messages, {"role": "user", "content": row.turns[len(answer.generations)]}]


def _record(generation: Generation) -> dict[str, Any]:
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "prompt_tokens": len(generation.prompt_token_ids),
        "finish_reason": generation.finish_reason,
        "stats": generation.stats.as_dict(),
    }


def _total(parts: Iterable[AcceptanceStats]) -> AcceptanceStats:
    total = AcceptanceStats()
    for part in parts:
        total.add(part)
    return total
