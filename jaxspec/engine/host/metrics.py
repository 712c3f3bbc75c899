"""What an engine has done and is doing, under the names that vLLM's metrics have."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jaxspec.engine.host.answer import FinishReason
from jaxspec.engine.host.counters import Counters
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.statistics import AcceptanceStats

BOUNDS = tuple(digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5))
"""The upper bounds of a histogram's buckets, in seconds: 1 ms to more than an hour."""

_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "aborted": "abort",
    "failed": "error",
}


@dataclass
class Histogram:
    """How often values were at most as large as each of `BOUNDS`.

    Attributes:
      counts: the number of values in each bucket alone; the last is of those above every bound.
      sum: of all values.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(BOUNDS, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> dict[str, int]:
        """The number of values up to each bound, as Prometheus counts; "+Inf" has all."""
        total, buckets = 0, {}
        for bound, count in zip([*map("{:g}".format, BOUNDS), "+Inf"], self.counts, strict=True):
            total += count
            buckets[bound] = total
        return buckets


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
      kind: as in Prometheus. The name of a counter is without "_total".
      about: what it counts, in a sentence.
      value: a number; a histogram; or a number for each value of `label`.
      label: the label's name, where there is one.
    """

    kind: Literal["counter", "gauge", "histogram"]
    about: str
    value: float | Histogram | Mapping[str, float]
    label: str | None = None


@dataclass
class Totals:
    """Totals of the requests that have ended, kept by the engine's thread."""

    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    generation_tokens: int = 0
    ended: Counter[FinishReason] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=Histogram)
    each_token: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)

    def add(self, request: Request) -> None:
        """Adds a request that has ended."""
        assert request.finish_reason is not None
        self.stats.add(request.stats)
        count = len(request.token_ids)
        self.generation_tokens += count
        self.ended[request.finish_reason] += 1
        arrived, first, last = request.arrived_at, request.first_token_at, request.finished_at
        if arrived is None or first is None or last is None:
            return
        self.first_token.observe(first - arrived)
        self.whole.observe(last - arrived)
        if count > 1:
            self.each_token.observe((last - first) / (count - 1))


def metrics(
    totals: Totals, counters: Counters, *, running: int, waiting: int, cache_usage: float
) -> dict[str, Metric]:
    """Metrics by vLLM's names, without its prefix.

    Args:
      totals, counters: of one engine.
      running, waiting: its requests with a slot, and those without.
      cache_usage: the share of its pages that requests use.
    """
    stats = totals.stats
    read = counters.prompt_rows_used + counters.cached_rows
    by_position = {str(position): float(count) for position, count in enumerate(stats.accepted_at)}
    by_reason = {name: float(totals.ended[reason]) for reason, name in _REASONS.items()}
    return {
        "num_requests_running": Metric("gauge", "Requests that have a slot.", running),
        "num_requests_waiting": Metric("gauge", "Requests that wait for a slot.", waiting),
        "kv_cache_usage_perc": Metric("gauge", "The share of the cache's pages in use, 0 to 1.", cache_usage),
        "prompt_tokens": Metric("counter", "Tokens of prompts, found in the cache or computed.", read),
        "generation_tokens": Metric("counter", "Tokens of ended answers.", totals.generation_tokens),
        "request_success": Metric("counter", "Requests that have ended.", by_reason, "finished_reason"),
        "prefix_cache_queries": Metric("counter", "Tokens of prompts looked for in the prefix cache.", read),
        "prefix_cache_hits": Metric("counter", "Those of them that were found.", counters.cached_rows),
        "spec_decode_num_drafts": Metric("counter", "Steps that verified drafts.", stats.draft_steps),
        "spec_decode_num_draft_tokens": Metric("counter", "Drafts verified.", stats.drafted),
        "spec_decode_num_accepted_tokens": Metric("counter", "Drafts accepted.", stats.accepted),
        "spec_decode_num_accepted_tokens_per_pos": Metric(
            "counter", "Drafts accepted at each position.", by_position, "position"
        ),
        "time_to_first_token_seconds": Metric(
            "histogram", "From a request's arrival to its first token.", totals.first_token
        ),
        "request_time_per_output_token_seconds": Metric(
            "histogram", "Mean time per token after the first of an answer.", totals.each_token
        ),
        "e2e_request_latency_seconds": Metric(
            "histogram", "From a request's arrival to its end.", totals.whole
        ),
    }
