"""What an engine says of itself under vLLM's names."""

import pytest

from jaxspec import AcceptanceStats, SamplingParams
from jaxspec.engine.host.metrics import BOUNDS, Histogram


def test_metrics_are_those_of_the_answers(tiny_engines, prompts):
    """Of an engine that other tests use, so of the difference; its histograms are copied."""
    engine = tiny_engines.load("eagle3", 3, steps_per_dispatch=2)
    engine.forget_prefixes()
    before = {
        name: metric.value.counts[:] if isinstance(metric.value, Histogram) else metric.value
        for name, metric in engine.metrics().items()
    }
    answers = engine.generate([*prompts, prompts[0]], max_new_tokens=11)
    engine.abort(aborted := engine.make_request(prompts[0], SamplingParams()))
    engine.submit([aborted], lambda request: lambda piece: None)
    assert engine.wait_idle(60)
    after = engine.metrics()

    def since(name):
        now, past = after[name].value, before[name]
        if isinstance(now, Histogram):
            return sum(now.counts) - sum(past)
        if isinstance(now, dict):
            return {key: value - past.get(key, 0) for key, value in now.items()}
        return now - past

    stats = AcceptanceStats.total(answers)
    assert since("generation_tokens") == sum(len(answer.token_ids) for answer in answers)
    assert since("spec_decode_num_drafts") == stats.draft_steps > 0
    assert since("spec_decode_num_draft_tokens") == stats.drafted
    assert since("spec_decode_num_accepted_tokens") == stats.accepted
    at = since("spec_decode_num_accepted_tokens_per_pos")
    assert [at[str(i)] for i in range(len(stats.accepted_at))] == stats.accepted_at
    assert since("prompt_tokens") == since("prefix_cache_queries") == sum(map(len, [*prompts, prompts[0]]))
    assert since("prefix_cache_hits") == sum(answer.cached_tokens for answer in answers)
    assert since("request_success") == {"stop": 0, "length": len(answers), "abort": 1, "error": 0}
    assert since("time_to_first_token_seconds") == since("e2e_request_latency_seconds") == len(answers)
    assert since("request_time_per_output_token_seconds") == len(answers)
    idle = {name: after[name].value for name in ("num_requests_running", "num_requests_waiting")}
    assert (set(idle.values()), after["kv_cache_usage_perc"].value) == ({0}, 0)


def test_metrics_of_requests_on_their_way(tiny_engines, prompts):
    engine = tiny_engines.load("none", 3)
    seen = []
    requests = [engine.make_request(prompt, SamplingParams(max_new_tokens=4)) for prompt in prompts[:5]]
    engine.submit(requests, lambda request: lambda piece: seen.append(engine.metrics()))
    assert engine.wait_idle(60)
    first = seen[0]
    assert first["num_requests_running"].value + first["num_requests_waiting"].value in (4, 5)
    assert first["num_requests_waiting"].value >= 2
    assert 0 < first["kv_cache_usage_perc"].value <= 1


def test_every_name_is_one_of_vllms(tiny_engines):
    """As `vllm/v1/metrics/loggers.py` and `vllm/v1/spec_decode/metrics.py` have them."""
    assert set(tiny_engines.load("none", 3).metrics()) == {
        "e2e_request_latency_seconds",
        "generation_tokens",
        "kv_cache_usage_perc",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "request_success",
        "request_time_per_output_token_seconds",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_drafts",
        "time_to_first_token_seconds",
    }


@pytest.mark.parametrize(
    ("value", "bound"), [(0.0, "0.001"), (0.001, "0.001"), (0.0011, "0.002"), (1e9, "+Inf")]
)
def test_a_bucket_has_what_is_at_most_its_bound(value, bound):
    histogram = Histogram()
    histogram.observe(value)
    buckets = histogram.buckets
    assert next(name for name, count in buckets.items() if count) == bound
    assert (buckets["+Inf"], histogram.sum, len(buckets)) == (1, value, len(BOUNDS) + 1)
