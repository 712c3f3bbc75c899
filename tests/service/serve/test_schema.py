"""The OpenAPI page, and what schemathesis makes of it."""

import hypothesis
import pytest
import schemathesis
from http_server import serving

from jaxspec.service.openai import CHAT, COMPLETIONS, FIELDS

PATHS = [CHAT, COMPLETIONS, "/v1/models", "/v1/models/{name}", "/health", "/metrics"]
CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
]
EXAMPLES = 100


def test_the_page_has_every_path_and_every_field(http):
    page = http.get("/openapi.json").json()
    assert sorted(page["paths"]) == sorted(PATHS)
    for endpoint, fields in FIELDS.items():
        body = page["paths"][endpoint]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = page["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        assert set(schema["properties"]) == set(fields)
        assert schema["additionalProperties"] is False


@pytest.fixture(scope="module")
def few(tiny_engine):
    """A server with few places, so that no example asks for much."""
    with serving(tiny_engine, max_unfinished=4) as made:
        yield made


@pytest.mark.parametrize("path", PATHS)
def test_no_request_that_fits_the_page_or_not_is_a_500(few, path):
    """And answers are what the page says of them."""
    page = schemathesis.openapi.from_url(f"{few.url}/openapi.json")
    operation = page[path]["POST" if path in FIELDS else "GET"]
    modes = schemathesis.GenerationMode
    examples = operation.as_strategy(generation_mode=modes.POSITIVE)
    if path in FIELDS or "{" in path:
        examples |= operation.as_strategy(generation_mode=modes.NEGATIVE)
    statuses = set()

    def check(case):
        answer = case.call(timeout=60)
        statuses.add(answer.status_code)
        # A schema whose value is complete and `min_tokens` leave no token: known, and the only such answer.
        asks = case.body if isinstance(case.body, dict) else {}
        is_stuck = asks.get("min_tokens") and asks.get("response_format")
        if is_stuck and answer.status_code == 503 and "the constraints allow no token" in answer.text:
            return
        case.validate_response(answer, checks=CHECKS)

    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(case=examples)
    def ask(case):
        check(case)
        if path == CHAT and isinstance(case.body, dict) and isinstance(case.body.get("messages"), list):
            # Few roles that are made up are ones that a template knows.
            case.body["messages"] = [{"role": "user", "content": "w6"}]
            check(case)

    ask()
    assert path not in FIELDS or {200, 400} <= statuses
