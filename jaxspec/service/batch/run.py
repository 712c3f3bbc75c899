"""Batch runs with one engine."""

import secrets
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from jaxspec.engine import Engine, Generation, Request
from jaxspec.sampling import SamplingParams, sample_seed
from jaxspec.service.batch.answer import Answer
from jaxspec.service.batch.progress import LOOK_AHEAD, Progress
from jaxspec.service.batch.read_ahead import ReadAhead
from jaxspec.service.rows import RefusedLine, Row, RowError, RowId, hash_json


def row_seed(seed: int, row_id: RowId, turn: int) -> int:
    """The seed of one request: a hash of the run's seed, the row's id and the number of the turn, from 0.

    No two requests share draws, even between runs with neighbouring seeds, and the answer to a row does not
    depend on other rows.
    """
    return int.from_bytes(hash_json([seed, row_id, turn], 8), "little")


@dataclass(frozen=True)
class _PendingRow:
    """A row in progress, or one of several samples of it.

    Attributes:
      index: its number among all rows of the run.
      row: the row.
      generations: the answers to its turns so far.
      sample: the number of the sample.
      ended: of each sample that has ended, its generations, and why it failed if it did; shared by all.
    """

    index: int
    row: Row
    generations: list[Generation]
    sample: int = 0
    ended: dict[int, tuple[list[Generation], object]] = field(default_factory=dict)


class BatchRun(Progress):
    """Answers rows with one engine, reading a few rows ahead.

    Attributes:
      seed: the run's seed.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Iterable[Row | RowError],
        params: SamplingParams,
        *,
        raw: bool = False,
        keep_order: bool = False,
    ):
        """Prepares a run; iterating over it (once) answers the rows.

        Args:
          engine: answers the requests.
          rows: read in a separate thread, so that running requests never wait for a slow input.
          params: sampling parameters for all that a row does not set itself. Their seed is the run's; None
            draws one at random, and `row_seed` derives the seeds of requests from it. A row's own seed is
            used for all of its turns. The first of several samples of a row has the row's seed, and
            `sample_seed` derives the others' from it.
          raw: pass text prompts without the chat template.
          keep_order: yield in the order of the rows. Answers wait for those before them, and slots may
            become idle while one row takes as long as `LOOK_AHEAD` * `Engine.max_pending` others.
        """
        super().__init__(rows, keep_order=keep_order)
        self._engine = engine
        self._look_ahead = LOOK_AHEAD * engine.max_pending
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._params = params
        self._raw = raw
        self._next_turns: deque[_PendingRow] = deque()
        self._pending: dict[int, _PendingRow] = {}
        self._num_requests = 0
        self._ended_requests: SimpleQueue[Request | None] = SimpleQueue()

    def __iter__(self) -> Generator[Answer | RowError, None, None]:
        """Runs the engine; yields rows as they finish, or in order.

        A row without an answer is yielded as its error: a malformed row, one that cannot be a request (for
        example because its prompt is too long), or one that the engine could not finish. Closing the
        iterator cancels unfinished rows.

        Raises:
          The exception that reading the rows raised.
        """
        # A new row wakes the engine's run, as an answer does: there may be a free slot.
        wake = partial(self._ended_requests.put, None)
        with closing(ReadAhead(self._rows, self._engine.max_pending, on_change=wake)) as self._source:
            while self._next_turns or not self._source.is_done:
                self._pending, self._num_requests = {}, 0
                with closing(self._generations()) as generations:
                    for index, generation in generations:
                        self._take(self._pending.pop(index), generation)
                        yield from self._ended()
                yield from self._ended()

    def _generations(self) -> Generator[tuple[int, Generation], None, None]:
        """One `Engine.run`; closing the generator ends it at once."""
        yield from self._engine.run(_Requests(self), ended=self._ended_requests)

    def _take(self, pending: _PendingRow, generation: Generation) -> None:
        """Adds a finished generation to its row, which then ends or continues with its next turn."""
        self._count(generation)
        pending = replace(pending, generations=[*pending.generations, generation])
        if generation.finish_reason not in ("stop", "length"):
            self._fail(pending, len(pending.generations), f"{generation.finish_reason}: {generation.error}")
        elif len(pending.generations) < len(pending.row.turns):
            self._next_turns.append(pending)
        else:
            self._end(pending, None)

    def _next_request(self) -> Request | None:
        """The next request, or None if there is none now."""
        while True:
            pending = self._next_turns.popleft() if self._next_turns else self._read()
            if pending is None:
                return None
            if pending.sample + 1 < (pending.row.n or 1):
                self._next_turns.appendleft(replace(pending, sample=pending.sample + 1))
            try:
                request = self._request(pending)
            except (ValueError, RecursionError) as error:
                self._fail(pending, len(pending.generations) + 1, error)
                continue
            self._pending[self._num_requests] = pending
            self._num_requests += 1
            return request

    def _read(self) -> _PendingRow | None:
        """The next row, or None if there is none now; waits for one only if nothing else is in progress."""
        read = self._next_row(may_wait=not self._pending)
        return None if read is None else _PendingRow(*read, [])

    def _request(self, pending: _PendingRow) -> Request:
        row, asked = pending.row, pending.row.asked
        seed = row.sampling.get("seed", row_seed(self.seed, row.id, len(pending.generations)))
        params = replace(self._params, **{**row.sampling, "seed": sample_seed(seed, pending.sample)})
        request = self._engine.make_request(
            _prompt(pending),
            params,
            raw=self._raw if asked is None else not asked.is_chat,
            chat_template_kwargs=row.chat_template_kwargs,
            **row.flags,
        )
        if asked is not None and params.max_new_tokens is None:
            request.max_new_tokens = asked.length(params, self._engine.room(len(request.prompt)))
        return request

    def _fail(self, pending: _PendingRow, turn: int, problem: object) -> None:
        self._end(pending, f"turn {turn}: {problem}" if pending.row.turns else problem)

    def _end(self, pending: _PendingRow, problem: object) -> None:
        """Ends a row once all of its samples have ended."""
        row, ended = pending.row, pending.ended
        ended[pending.sample] = pending.generations, problem
        if len(ended) < (row.n or 1):
            return
        generations = [generation for i in sorted(ended) for generation in ended[i][0]]
        problem = next((problem for _, problem in ended.values() if problem is not None), None)
        if problem is None:
            answer: Answer | RowError = Answer.to(row, generations)
        elif row.asked is not None and isinstance(problem, ValueError):
            refused = RefusedLine(str(row.id), row.asked.error(problem))
            answer = RowError(row.place, refused, generations, refused.record(row.digest))
        else:
            answer = RowError(row.place, problem, generations)
        self._done[pending.index] = answer


class _Requests(Iterator[Request]):
    """The requests of a run. `Engine.run` asks again after the end, when a request has ended or a row has
    arrived, since there may be a next turn or another row by then."""

    def __init__(self, run: BatchRun):
        self._run = run

    def __next__(self) -> Request:
        request = self._run._next_request()
        if request is None:
            raise StopIteration
        return request


def _prompt(pending: _PendingRow) -> Any:
    row = pending.row
    if row.prompt is not None:
        return row.prompt
    messages = []
    for turn, generation in zip(row.turns, pending.generations, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": generation.text}]
    return [*messages, {"role": "user", "content": row.turns[len(pending.generations)]}]
