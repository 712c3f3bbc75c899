"""What the server refuses: an error object that names the field, and nothing else happens."""

import asyncio
import json

import httpx
import openai
import pytest
from http_server import serving

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "w6"}], "max_tokens": 4}
JSON = "application/json"
TEXT = {"model": "tiny", "prompt": "w6", "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("chat/completions", {**CHAT, "temperature": "hot"}, 400, "temperature", None),
        ("chat/completions", {**CHAT, "max_new_tokens": 4}, 400, "max_new_tokens", None),
        ("chat/completions", {**CHAT, "messages": None}, 400, "messages", None),
        ("chat/completions", {**CHAT, "messages": [{"role": "x", "content": "w6"}]}, 400, "messages", None),
        ("chat/completions", {**CHAT, "max_tokens": 500}, 400, "max_tokens", "context_length_exceeded"),
        ("chat/completions", {**CHAT, "num_speculative_tokens": 9}, 400, "num_speculative_tokens", None),
        ("chat/completions", {**CHAT, "stop": ["a</s>"]}, 400, "stop", None),
        ("chat/completions", {**CHAT, "chat_template_kwargs": {"no": 1}}, 400, "chat_template_kwargs", None),
        ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools", None),
        ("chat/completions", {**CHAT, "reasoning_effort": "low"}, 400, "reasoning_effort", None),
        ("chat/completions", {**CHAT, "model": "other"}, 404, "model", "model_not_found"),
        ("completions", {**TEXT, "prompt": "w6 " * 200}, 400, "prompt", "context_length_exceeded"),
        ("completions", {**TEXT, "prompt": "w6 " * 20_000}, 400, "prompt", "context_length_exceeded"),
        ("completions", {**TEXT, "prompt": [6, 128_000]}, 400, "prompt", None),
        ("completions", {**TEXT, "max_tokens": 0}, 400, "max_tokens", None),
        (
            "completions",
            {**TEXT, "echo": True, "max_tokens": 0, "prompt": "w6 " * 150},
            400,
            "prompt",
            "context_length_exceeded",
        ),
        ("completions", {**TEXT, "stop_token_ids": [999]}, 400, "stop_token_ids", None),
        ("completions", [], 400, None, None),
        ("nothing", {}, 404, None, None),
    ],
)
def test_bad_input_is_an_error_object(http, path, body, status, param, code):
    for stream in (False, True):
        asked = {**body, "stream": stream} if isinstance(body, dict) else body
        answer = http.post(f"/v1/{path}", json=asked)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code), error
        assert error["type"] == "invalid_request_error"
        assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"temperature": NaN}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "application/json", 400),
        (b'{"model": "tiny", "prompt": "w6", "seed": ' + b"9" * 5_000 + b"}", "application/json", 400),
        (b"\xff", "application/json; charset=utf-8", 400),
        *(
            (b'{"model": "tiny", "prompt": "w6", "%s": %s%s}' % (field, b"[" * 900, b"]" * 900), JSON, 400)
            for field in (b"temperature", b"metadata", b"stop")
        ),
        (json.dumps(TEXT).encode(), "text/plain", 415),
        (json.dumps(TEXT).encode(), "application/x-www-form-urlencoded", 415),
    ],
)
def test_what_is_not_json_is_refused(http, content, kind, status):
    answer = http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("depth", [300, 900, 980])
@pytest.mark.parametrize("field", ["metadata", "chat_template_kwargs", "response_format", "messages"])
def test_what_is_nested_deeply_is_no_mistake_of_ours(http, depth, field):
    deep = '{"a":' * depth + "1" + "}" * depth
    more = {"messages": [{**CHAT["messages"][0], "more": 0}]} if field == "messages" else {field: 0}
    content = json.dumps({**CHAT, **more}).replace(": 0", f": {deep}")
    answer = http.post("/v1/chat/completions", content=content, headers={"content-type": JSON})
    assert answer.status_code in (200, 400), answer.text


def test_openais_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature must be a number") as error:
        client.chat.completions.create(**{**CHAT, "temperature": -1})
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.chat.completions.create(**{**CHAT, "model": "other"})
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_openais_client_knows_a_wrong_key_and_a_full_queue(tiny_engine):
    transport = openai.DefaultHttpxClient(trust_env=False)
    with (
        serving(tiny_engine, max_unfinished=1, api_key="k") as server,
        openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="k", max_retries=0, http_client=transport
        ) as client,
    ):
        with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            client.with_options(api_key="other").chat.completions.create(**CHAT)
        with server.engine.reserve(1), pytest.raises(openai.RateLimitError, match="unfinished") as error:
            client.chat.completions.create(**CHAT)
        assert error.value.code == "queue_full"
        assert client.chat.completions.create(**CHAT).choices


def test_a_key_is_asked_for_everywhere_but_at_health(tiny_engine):
    with (
        serving(tiny_engine, api_key="a key") as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        paths = [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models")]
        paths += [("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/v1/models/tiny")]
        for given in (None, "Bearer no", "Bearer", "Basic a key", "a key", "Bearer a keyy", "Bearer \xe9"):
            headers = {} if given is None else {"authorization": given.encode("latin-1")}
            for method, path in paths:
                answer = http.request(method, path, headers=headers, json=CHAT if method == "POST" else None)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
                assert answer.json()["error"]["code"] == "invalid_api_key"
        right = {"authorization": "Bearer a key"}
        assert http.post("/v1/chat/completions", json=CHAT, headers=right).status_code == 200
        assert http.get("/metrics", headers=right).status_code == 200
        assert http.get("/health").status_code == 200
        page = http.get("/openapi.json", headers=right).json()
        assert page["security"] == [{"key": []}]


def test_web_pages_are_refused_unless_they_are_named(tiny_engine):
    """As a browser's `fetch` asks: with an Origin, and first with OPTIONS."""
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-a"}
    mine, other = {"origin": "https://mine.org"}, {"origin": "https://other.org"}
    allowed = "access-control-allow-origin"

    def asks(http, origin):
        first = http.options("/v1/completions", headers={**origin, **ask})
        then = http.post("/v1/completions", json=TEXT, headers=origin)
        return [(answer.status_code, answer.headers.get(allowed)) for answer in (first, then)]

    with serving(tiny_engine) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        assert asks(http, mine) == [(403, None), (403, None)]
        assert http.get("/v1/models", headers=mine).status_code == 403
        assert http.post("/v1/completions", json=TEXT).status_code == 200
    with (
        serving(tiny_engine, cors_origins=["https://mine.org"], api_key="k") as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        assert asks(http, {**mine, "authorization": "Bearer k"}) == [(200, "https://mine.org")] * 2
        assert asks(http, other) == [(400, None), (403, None)]
        # The page may read why.
        assert asks(http, mine)[1] == (401, "https://mine.org")


def test_bodies_and_prompts_have_limits(tiny_engine):
    with (
        serving(tiny_engine, max_body=1000, max_prompt=5) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        long = json.dumps({**TEXT, "user": "x" * 1000}).encode()
        header = {"content-type": "application/json"}
        for content in (long, iter([long[:600], long[600:]])):  # with its length, and in chunks
            answer = http.post("/v1/completions", content=content, headers=header)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")
        answer = http.post("/v1/completions", json={**TEXT, "prompt": "w6 " * 6})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "prompt of 6 tokens: this server takes at most 5"
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert http.post("/v1/completions", json={**TEXT, "prompt": "w6 " * 5}).status_code == 200


def test_a_full_queue_is_429_and_nobody_else_notices(tiny_engine, gate):
    async def main(url):
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            gate.clear()
            waiting = [
                asyncio.ensure_future(http.post("/v1/completions", json={**TEXT, "stream": stream}))
                for stream in (False, True)
            ]
            while server.engine.num_unfinished < 2:
                await asyncio.sleep(0.01)
            refused = await http.post("/v1/completions", json=TEXT)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert refused.headers["retry-after"] == "1"
            assert (await http.get("/health")).status_code == 200
            gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
            assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
            # So many answers never have places; to try again would not help.
            never = await http.post("/v1/completions", json={**TEXT, "n": 3})
            assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
            metrics = (await http.get("/metrics")).text
            assert 'jaxspec:requests_refused_total{model_name="tiny",status="429"} 1.0' in metrics

    with serving(tiny_engine, max_unfinished=2) as server:
        asyncio.run(main(server.url))


@pytest.mark.parametrize("more", [{"n": 3}, {"n": 2, "best_of": 3}, {"prompt": ["w6", "w7", "w8"]}])
def test_every_answer_takes_a_place(tiny_engine, gate, more):
    async def main(url):
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:

            def post(**more):
                return asyncio.ensure_future(http.post("/v1/completions", json={**TEXT, **more}))

            gate.clear()
            waiting = [post(**more)]
            while not server.engine.num_unfinished:
                await asyncio.sleep(0.01)
            assert server.engine.num_unfinished == 3
            assert (await post(n=2)).status_code == 429
            waiting.append(post())
            while server.engine.num_unfinished < 4:
                await asyncio.sleep(0.01)
            gate.set()
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]

    with serving(tiny_engine, max_unfinished=4) as server:
        asyncio.run(main(server.url))


def test_a_mistake_of_ours_is_500_without_its_details(tiny_engine, monkeypatch, caplog):
    def wrong(*arguments, **options):
        raise KeyError("a secret")

    monkeypatch.setattr(tiny_engine, "make_request", wrong)
    with serving(tiny_engine) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=TEXT, trust_env=False)
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "the server has made a mistake",
        "type": "server_error",
        "param": None,
        "code": None,
    }
