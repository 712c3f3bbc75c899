"""An engine's metrics in Prometheus' text format, under vLLM's names."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from jaxspec.engine import Engine
from jaxspec.engine.host.metrics import Histogram, Metric


class Metrics(Collector):
    """Reads the engine's metrics whenever they are asked for.

    Attributes:
      refused: the server's own count of requests that were refused, by the status of the answer.
    """

    def __init__(self, engine: Engine, model: str):
        self._engine, self._model = engine, model
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.refused = Counter(
            "jaxspec:requests_refused",
            "Requests refused by the server, by the status of the answer.",
            ["model_name", "status"],
            registry=self._registry,
        )

    def text(self) -> bytes:
        """The metrics as text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """What `prometheus_client` asks for."""
        for name, metric in self._engine.metrics().items():
            yield self._family(f"vllm:{name}", metric)
        # Where K varies, fewer steps draft at a later position, so acceptance there is a share of these.
        drafted = {str(i): float(count) for i, count in enumerate(self._engine.core.totals.stats.drafted_at)}
        about = Metric("counter", "Drafts verified at each position.", drafted, "position")
        yield self._family("jaxspec:spec_decode_num_draft_tokens_per_pos", about)

    def _family(self, name: str, metric: Metric) -> Family:
        labels = ["model_name", *([] if metric.label is None else [metric.label])]
        if isinstance(metric.value, Histogram):
            histogram = HistogramMetricFamily(name, metric.about, labels=labels)
            buckets = [(bound, float(count)) for bound, count in metric.value.buckets.items()]
            histogram.add_metric([self._model], buckets, metric.value.sum)
            return histogram
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(name, metric.about, labels=labels)
        if isinstance(metric.value, float | int):
            family.add_metric([self._model], metric.value)
        else:
            for value, number in metric.value.items():
                family.add_metric([self._model, value], number)
        return family
