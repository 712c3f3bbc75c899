"""Sending an engine requests that arrive over time, and timing their answers."""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from bench.workloads import Asked
from jaxspec import AcceptanceStats, Engine, SamplingParams
from jaxspec.engine.host.counters import Counters
from jaxspec.engine.host.request import Request


@dataclass
class Answered:
    """Times and sizes of one answered request; times are in seconds of `time.perf_counter`.

    Attributes:
      arrived: when the request was submitted.
      first_token_at, finished_at: when the host received the first and the last token.
      prompt_tokens, tokens: lengths of prompt and answer.
      stats: acceptance statistics.
      waits: seconds between consecutive pieces of the answer.
    """

    arrived: float
    first_token_at: float
    finished_at: float
    prompt_tokens: int
    tokens: int
    stats: AcceptanceStats
    waits: Sequence[float] = ()

    @property
    def per_token(self) -> float:
        """Seconds per token after the first."""
        return (self.finished_at - self.first_token_at) / (self.tokens - 1)


@dataclass(frozen=True)
class Run:
    """One run of all requests: their answers, and the engine's counters over the run."""

    answers: list[Answered]
    work: Counters

    @property
    def seconds(self) -> float:
        """Seconds from the first submission to the end of the last answer."""
        return max(a.finished_at for a in self.answers) - min(a.arrived for a in self.answers)


def run(
    engine: Engine,
    asked: Sequence[Asked],
    arrivals: Sequence[float],
    params: SamplingParams,
    *,
    is_streamed: bool = False,
) -> Run:
    """Submits every request when it is due, and waits for all answers.

    Args:
      engine: answers the requests; its prefix cache is emptied first.
      asked: the requests.
      arrivals: seconds from the start, ascending.
      params: sampling parameters of every request, except for the length; the seed is the request's index.
      is_streamed: stream the answers, and record the waits between pieces.

    Raises:
      ValueError: the engine rejects a request.
    """
    # A repeated run must not find the prompts of the one before.
    engine.forget_prefixes()
    engine.wait_idle()
    before = engine.counters
    due = deque(zip(arrivals, enumerate(asked), strict=True))
    requests: list[Request] = []
    pieces_at: dict[Request, list[float]] = defaultdict(list)
    begin = time.perf_counter()
    while due:
        time.sleep(max(0.0, due[0][0] - (time.perf_counter() - begin)))
        ready = []
        while due and due[0][0] <= time.perf_counter() - begin:
            _, (index, request) = due.popleft()
            own = replace(params, seed=index, max_new_tokens=request.new_tokens)
            ready.append(engine.make_request(request.prompt, own, is_streamed=is_streamed))
        engine.submit(ready, lambda request: lambda piece: pieces_at[request].append(time.perf_counter()))
        requests += ready
    engine.wait_idle()
    answers = [_answered(request, np.diff(pieces_at[request]).tolist()) for request in requests]
    return Run(answers, engine.counters.since(before))


def _answered(request: Request, waits: Sequence[float]) -> Answered:
    if request.arrived_at is None or request.first_token_at is None or request.finished_at is None:
        raise ValueError(f"request {request.id} has no answer: {request.error}")
    return Answered(
        request.arrived_at,
        request.first_token_at,
        request.finished_at,
        len(request.prompt),
        len(request.token_ids),
        request.stats,
        waits,
    )


def summary(runs: Sequence[Run], *, step_bytes: int, prompt_bytes: int, bandwidth: float) -> dict[str, Any]:
    """Figures over several runs of the same requests, as JSON values.

    Totals are those of the median run, percentiles are over the requests of all runs, and shares are over the
    work of all runs.

    Args:
      runs: the runs.
      step_bytes: bytes of weights that a decoding step reads.
      prompt_bytes: bytes of weights that a pass over prompts alone reads.
      bandwidth: memory bandwidth, in bytes per second.
    """
    answers = [answer for run in runs for answer in run.answers]
    work = sum((run.work for run in runs), Counters())
    seconds = median(run.seconds for run in runs)
    tokens = sum(answer.tokens for answer in answers) / len(runs)
    stats = AcceptanceStats.total(answer.stats for answer in answers)
    floor = (work.steps * step_bytes + work.prompt_passes * prompt_bytes) / bandwidth
    first = [answer.first_token_at - answer.arrived for answer in answers]
    later = [answer.per_token for answer in answers if answer.tokens > 1]
    waits = [wait for answer in answers for wait in answer.waits]
    return {
        "requests": len(runs[0].answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in runs[0].answers),
        "new_tokens": tokens,
        "total_ms": seconds * 1e3,
        "total_ms_runs": [run.seconds * 1e3 for run in runs],
        "tokens_per_second": tokens / seconds,
        "first_token_ms": _percentiles(first),
        "per_token_ms": _percentiles(later),
        "wait_ms": {**(_percentiles(waits) or {}), "most": max(waits) * 1e3} if waits else None,
        "tokens_per_step": stats.acceptance_length,
        "padding_share": _wasted(work.prompt_rows, work.prompt_rows_used),
        "idle_share": _wasted(work.slot_steps, work.slot_steps_used),
        "floor_share": floor / sum(run.seconds for run in runs),
        "work": vars(work),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """The 50th and the 99th percentile, in milliseconds; None without values."""
    if not seconds:
        return None
    return {f"p{rank}": float(np.percentile(seconds, rank)) * 1e3 for rank in (50, 99)}


def _wasted(computed: int, used: int) -> float | None:
    return 1 - used / computed if computed else None
