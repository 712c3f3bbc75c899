"""/metrics shows what the engine counts, under vLLM's names."""

import httpx
from options import submitted
from prometheus_client.parser import text_string_to_metric_families

from jaxspec import AcceptanceStats
from jaxspec.engine.host.metrics import Histogram

BODY = {"model": "tiny", "prompt": "w6 w7", "temperature": 0, "max_tokens": 40, "ignore_eos": True}


def read(http):
    """Every value by its name and labels but the model's."""
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    assert {sample.labels.pop("model_name") for sample in samples} == {"tiny"}
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_they_are_the_engines(http, tiny_engine):
    before = read(http)
    with submitted(tiny_engine) as requests:
        for more in ({}, {"n": 2}, {"stream": True}, {"stop": "w"}):
            assert http.post("/v1/completions", json={**BODY, **more}).status_code == 200
    after = read(http)
    for name, metric in tiny_engine.metrics().items():
        ending = "_total" if metric.kind == "counter" else ""
        if isinstance(metric.value, Histogram):
            assert after[f"vllm:{name}_sum",] == metric.value.sum
            for bound, count in metric.value.buckets.items():
                assert after[f"vllm:{name}_bucket", bound] == count
        elif metric.label is None:
            assert after[f"vllm:{name}{ending}",] == metric.value
        else:
            for value, number in metric.value.items():
                assert after[f"vllm:{name}{ending}", value] == number

    def grown(name, *labels):
        return after[name, *labels] - before.get((name, *labels), 0)

    stats = AcceptanceStats.total(request.stats for request in requests)
    assert (len(requests), stats.drafted > 0) == (5, True)
    assert grown("vllm:request_success_total", "length") == 4
    assert grown("vllm:generation_tokens_total") == sum(len(request.token_ids) for request in requests)
    for i, (accepted, drafted) in enumerate(zip(stats.accepted_at, stats.drafted_at, strict=True)):
        assert grown("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)) == accepted
        assert grown("jaxspec:spec_decode_num_draft_tokens_per_pos_total", str(i)) == drafted


def test_refused_requests_are_counted_by_status(http):
    before = read(http)
    for body in ({**BODY, "n": 0}, {**BODY, "model": "x"}, {**BODY, "n": 200}):
        http.post("/v1/completions", json=body)
    after = read(http)
    for status, count in (("400", 2), ("404", 1)):
        name = ("jaxspec:requests_refused_total", status)
        assert after[name] - before.get(name, 0) == count


def test_what_is_running_is_seen(server, tiny_engine, slow):
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
        body = {**BODY, "stream": True, "max_tokens": 120}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            seen = read(http)
            assert seen["vllm:num_requests_running",] == 1
            assert seen["vllm:kv_cache_usage_perc",] > 0
            assert list(lines)[-2] == "data: [DONE]"
        assert read(http)["vllm:num_requests_running",] == 0
