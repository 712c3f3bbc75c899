"""Every option of `jaxspec serve` reaches the engine, the application or the server."""

import shutil
import sys
from dataclasses import fields
from types import SimpleNamespace

import httpx
import pytest
from http_server import serving
from options import PROMPT, SAMPLING, answer_to, arguments, assert_complete, same, submitted
from options import fields as names

import jaxspec
from jaxspec.commands import serve
from jaxspec.service.serve import app, server
from jaxspec.service.serve.app import Access

TO_LOAD = {"model", "drafter", "device", "num_speculative_tokens", "no_speculation"}
TO_LOAD |= {"batch_size", "max_model_len", "tensor_parallel", "imports", "prepare"}
TO_APP = {"sampling_defaults", "name", "api_key_file", "cors_origin", "max_body", "max_prompt", "max_queue"}
TO_SERVER = {"host", "port", "grace"}


@pytest.fixture
def told(monkeypatch, tiny_config):
    """Runs the command line; returns what it would load and serve."""
    engine = SimpleNamespace(close=lambda: None, prepare=lambda *kinds: None)

    def run(*words, model=tiny_config):
        seen = SimpleNamespace()

        def load(model, **settings):
            seen.model, seen.settings = model, settings
            return engine

        def make_app(client, name, access, sampling):
            seen.client, seen.name, seen.access, seen.sampling = client, name, access, sampling

        def run_server(app, client, listening, *, grace):
            seen.address, seen.grace = listening.getsockname(), grace

        monkeypatch.setattr(jaxspec, "load", load)
        monkeypatch.setattr(app, "make_app", make_app)
        monkeypatch.setattr(server, "run_server", run_server)
        assert serve.main([str(model), "--port", "0", *map(str, words)]) == 0
        assert seen.client.engine is engine
        return seen

    return run


def test_no_option_is_without_a_test():
    assert_complete("jaxspec serve", arguments(serve.main), TO_LOAD, TO_APP, TO_SERVER)
    assert_complete("Access", names(Access), {"api_key", "cors_origins", "max_body", "max_prompt"})


def test_what_is_loaded(told, tiny_config, tmp_path):
    found = told()
    assert (found.model, found.settings) == (str(tiny_config), {"drafter": {}, "device": None})
    words = ["--batch-size", 3, "--max-model-len", 50, "--tensor-parallel", 1, "--device", "cpu:0"]
    assert told(*words).settings == {
        "drafter": {},
        "device": "cpu:0",
        "batch_size": 3,
        "max_model_len": 50,
        "tensor_parallel": 1,
    }
    assert told("--num-speculative-tokens", 2).settings["drafter"] == {"num_speculative_tokens": 2}
    assert told("--no-speculation").settings["drafter"] == {"kind": "none"}
    drafter = told("--drafter", "ngram", "--num-speculative-tokens", "auto").settings["drafter"]
    assert (drafter["kind"], drafter["num_speculative_tokens"]) == ("ngram", "auto")
    (tmp_path / "mine.py").write_text("import sys\nsys.modules['imported by serve'] = None\n", "utf-8")
    told("--import", tmp_path / "mine.py")
    assert sys.modules.pop("imported by serve", 0) is None


def test_what_is_prepared_before_it_serves(told, capsys):
    engine = told().client.engine
    engine.prepare = lambda *kinds: print(kinds, file=sys.stderr)
    for words, expected in (((), "()"), (("--prepare", "logprobs,json"), "('logprobs', 'json')")):
        capsys.readouterr()
        told(*words)
        prepared, serving = capsys.readouterr().err.splitlines()
        assert (prepared, serving[:15]) == (expected, "serving tiny at")
    for wrong in ("logprobs,jsn", "", "json,"):
        with pytest.raises(SystemExit):
            told("--prepare", wrong)
        problem = f"--prepare: {wrong.rpartition(',')[2]!r} is none of logprobs, json, penalties, bias, words"
        assert problem in capsys.readouterr().err


def test_what_is_served(told, tiny_config, monkeypatch, tmp_path):
    monkeypatch.delenv("JAXSPEC_API_KEY", raising=False)
    found = told()
    assert (found.name, found.access) == ("tiny", Access())
    assert found.client.max_unfinished == 256
    origins = ["--cors-origin", "https://a.org", "--cors-origin", "https://b.org"]
    found = told("--name", "other", *origins, "--max-body", 9, "--max-prompt", 8, "--max-queue", 7)
    assert (found.name, found.client.max_unfinished) == ("other", 7)
    assert found.access == Access(None, ("https://a.org", "https://b.org"), 9, 8)
    monkeypatch.setenv("JAXSPEC_API_KEY", "from outside")
    with pytest.raises(AssertionError):  # a key has no spaces
        told()
    monkeypatch.setenv("JAXSPEC_API_KEY", "outside")
    assert told().access.api_key == "outside"
    (tmp_path / "key").write_text("inside\n", "utf-8")
    assert told("--api-key-file", tmp_path / "key").access.api_key == "inside"
    assert len(fields(Access)) == 4


def test_what_requests_have_that_do_not_say(told, tiny_config, tmp_path, capsys):
    assert told().sampling == {}
    with pytest.raises(AssertionError):
        told("--sampling-defaults")
    assert "has no generation_config.json that recommends any" in capsys.readouterr().err
    model = tmp_path / "recommended"
    shutil.copytree(tiny_config.with_name("model"), model)
    (model / "generation_config.json").write_text('{"do_sample": true, "top_k": 4, "unknown": 1}', "utf-8")
    assert told("--sampling-defaults", model=model).sampling == {"temperature": 1.0, "top_k": 4}


def test_defaults_reach_the_answers_of_bodies_that_do_not_say(engine):
    messages = [{"role": "user", "content": PROMPT}]
    sampling = {"top_k": 1, "seed": 3, "temperature": 0.5}
    with serving(engine, sampling=sampling) as server, submitted(engine) as requests:
        for body in ({}, {"top_k": 5, "temperature": 2.0}):
            told = {"model": "tiny", "messages": messages, "max_tokens": 2, **body}
            url = f"{server.url}/v1/chat/completions"
            assert httpx.post(url, json=told, timeout=60, trust_env=False).status_code == 200
    params = [request.params for request in requests]
    assert [(each.top_k, each.temperature, each.seed) for each in params] == [(1, 0.5, 3), (5, 2.0, 3)]


def test_a_shipped_configuration_and_a_hub_id_are_named_as_they_are_given(told):
    assert told(model="smollm2-135m").name == "smollm2-135m"
    assert told(model="org/name").name == "org/name"


def test_where_it_is_served(told, capsys):
    found = told()
    assert found.address[0] == "127.0.0.1"
    assert found.grace == 30
    assert f"serving tiny at http://127.0.0.1:{found.address[1]}/v1\n" in capsys.readouterr().err
    assert told("--grace", "2.5").grace == 2.5
    found = told("--host", "0.0.0.0")
    assert found.address[0] == "0.0.0.0"
    warning, _ = capsys.readouterr().err.splitlines()[-2:]
    assert warning.startswith("warning: everybody who reaches 0.0.0.0 can use this server")
    port = found.address[1]
    assert told("--port", port).address[1] == port  # the last one counts


def body_of(options):
    """Sampling parameters as fields of a chat."""
    body = {"temperature": 0, **options}
    if "max_new_tokens" in body:
        body["max_tokens"] = body.pop("max_new_tokens")
    if "json_schema" in body:
        schema = {"name": "any", "schema": body.pop("json_schema")}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if "logprobs" in body:
        body |= {"top_logprobs": body["logprobs"], "logprobs": True}
    return body


@pytest.fixture(scope="module")
def ask(engine):
    """Asks one server for all parameters for a chat; returns its answer and the request of the engine."""
    with serving(engine) as server, httpx.Client(timeout=60, trust_env=False) as http:

        def asked(body):
            with submitted(engine) as requests:
                answer = http.post(f"{server.url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer, requests[0]

        yield asked


@pytest.mark.parametrize("name", list(SAMPLING))
def test_every_sampling_parameter_of_a_body_reaches_the_answer(engine, plain, ask, name):
    options = SAMPLING[name].options(name, plain)
    messages = [{"role": "user", "content": PROMPT}]
    expected = same(answer_to(engine, messages, options))
    for stream in (True, False):
        body = {"model": "tiny", "messages": messages, "stream": stream, **body_of(options)}
        answer, request = ask(body)
        assert same(request.generation()) == expected
    if name == "max_new_tokens":
        told = answer.json()["usage"]["completion_tokens_details"]
        stats = request.stats
        assert told == {"drafted_tokens": stats.drafted, "accepted_tokens": stats.accepted}
        assert stats.accepted > 0


def test_what_a_body_says_of_its_prompt_reaches_it(engine):
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "w9"}]
    ways = [{"chat_template_kwargs": {"note": "w8"}}, {"continue_final_message": True}]
    seen = []
    with serving(engine) as server:
        for way in ({}, *ways):
            body = {"model": "tiny", "messages": messages, "temperature": 0, **way}
            with submitted(engine) as requests:
                url = f"{server.url}/v1/chat/completions"
                assert httpx.post(url, json=body, timeout=60, trust_env=False).status_code == 200
            seen.append(requests[0].prompt)
            assert seen[-1] == answer_to(engine, messages, {}, **way).prompt_token_ids
        # This tokenizer has no other tokens for it.
        body = {"model": "tiny", "prompt": "<s>", "special_tokens_as_text": True}
        told = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False)
        assert "special_tokens_as_text: this tokenizer has no other tokens" in told.text
        assert told.json()["error"]["param"] == "special_tokens_as_text"
    assert len(set(map(tuple, seen))) == 3
