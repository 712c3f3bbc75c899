"""Files for OpenAI's batch API: what a hosted service takes runs here, and what comes out has its form."""

import json
import re
import shutil

import pytest
from fake_engine import FakeEngine

from jaxspec import SamplingParams
from jaxspec.commands import batch, batch_job
from jaxspec.service.batch import BatchRun
from jaxspec.service.rows import Form, Row, RowError, read_rows
from jaxspec.service.rows.openai_lines import KEYS

USER = {"role": "user", "content": [{"type": "text", "text": "w6"}]}
CHAT = {
    "custom_id": "chat",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "gpt-4o-mini", "messages": [USER], "max_completion_tokens": 4, "temperature": 0.5},
}
TEXT = {
    "custom_id": "text",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "m", "prompt": "w7", "max_tokens": 3, "n": 2, "seed": 5, "user": "Ann", "store": True},
}


def line(of=CHAT, *, custom_id=None, body=None, **changes):
    """A line with changes."""
    values = {**of, **changes, "body": {**of["body"], **(body or {})}}
    return values if custom_id is None else {**values, "custom_id": custom_id}


def asks(text, custom_id):
    return line(custom_id=custom_id, body={"messages": [{"role": "user", "content": text}]})


@pytest.fixture
def read(tmp_path):
    def read(*lines, **form):
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in lines), "utf-8")
        return list(read_rows(path, form=Form(openai=True, **form)))

    return read


def test_a_line_is_a_row_that_asks_for_what_its_body_says(read):
    chat, text = read(CHAT, TEXT)
    assert (chat.id, chat.prompt, chat.n) == ("chat", [{"role": "user", "content": "w6"}], None)
    assert chat.sampling == {"temperature": 0.5, "max_new_tokens": 4}
    assert (text.id, text.prompt, text.n) == ("text", "w7", 2)
    assert text.sampling == {"temperature": 1.0, "max_new_tokens": 3, "seed": 5}
    same, one = read(line(custom_id="b"), line(TEXT, custom_id="c", body={"n": 1}))
    assert same.digest == chat.digest
    assert len({chat.digest, text.digest, one.digest}) == 3
    (plain,) = read({"prompt": "w7", "temperature": 1.0, "max_new_tokens": 3, "seed": 5})
    assert plain.digest != one.digest  # which the chat template does not see


def test_what_the_body_asks_reaches_the_engine(read):
    tools = [{"type": "function", "function": {"name": "sum"}}]
    asked = {"tools": tools, "stop": "a", "top_p": 0.5, "logprobs": True, "top_logprobs": 2}
    engine, raws = FakeEngine(), []
    make = engine.make_request

    def recording(prompt, params, *, raw, **options):
        raws.append(raw)
        return make(prompt, params, raw=raw, **options)

    engine.make_request = recording
    rows = read(line(body={**asked, "logprobs": False, "top_logprobs": None}), TEXT)
    ended = list(BatchRun(engine, rows, SamplingParams(seed=1), raw=True, keep_order=True))
    assert [len(each.generations) for each in ended] == [1, 2]
    chat, text, second = engine.params
    assert (chat.stop, chat.top_p, chat.temperature, chat.max_new_tokens) == (("a",), 0.5, 0.5, 4)
    assert (text.seed, text.max_new_tokens) == (5, 3)
    assert second.seed != text.seed
    assert engine.template_kwargs[0] == {"tools": tools}
    assert raws == [False, True, True]
    penalised = {"presence_penalty": 0, "frequency_penalty": 0.5, "logit_bias": {"7": -100}}
    every = SamplingParams(seed=1, presence_penalty=1.0, min_tokens=2)
    list(BatchRun(engine, read(line(body=penalised)), every))
    last = engine.params[-1]
    assert (last.presence_penalty, last.frequency_penalty, last.logit_bias) == (0.0, 0.5, ((7, -100.0),))
    assert last.min_tokens == 2
    (row,) = read(line(body=asked))
    assert row.sampling["logprobs"] == 2


def test_an_answer_without_a_limit_may_fill_the_model(tiny_engine, read):
    open_end = {"max_completion_tokens": None, "temperature": 0, "ignore_eos": True}
    rows = read(line(body=open_end), line(custom_id="b", body={**open_end, "max_completion_tokens": 2}))
    whole, cut = BatchRun(tiny_engine, rows, SamplingParams(), keep_order=True)
    (whole,), (cut,) = whole.generations, cut.generations
    assert len(whole.prompt_token_ids) + len(whole.token_ids) == tiny_engine.max_model_len
    assert len(cut.token_ids) == 2
    text = line(TEXT, body={"max_tokens": None, "n": 1, "temperature": 0, "ignore_eos": True})
    for params, size in ((SamplingParams(), 16), (SamplingParams(max_new_tokens=5), 5)):
        (ended,) = BatchRun(tiny_engine, read(text), params)
        assert len(ended.generations[0].token_ids) == size


def test_options_of_the_command_are_for_bodies_that_do_not_say(read):
    defaults = {"chat_template_kwargs": {"think": False}, "special_tokens_as_text": True}
    own = line(body={"chat_template_kwargs": {"a": 1}, "special_tokens_as_text": False}, custom_id="own")
    chat, text, own = read(CHAT, TEXT, own, defaults=defaults)
    assert (chat.chat_template_kwargs, chat.flags) == ({"think": False}, {"special_tokens_as_text": True})
    assert (text.chat_template_kwargs, text.flags) == ({}, {"special_tokens_as_text": True})
    assert (own.chat_template_kwargs, own.flags) == ({"think": False, "a": 1}, {})
    tools = [{"type": "function", "function": {"name": "sum"}}]
    (with_tools,) = read(line(body={"tools": tools}), defaults=defaults)
    assert with_tools.chat_template_kwargs == {"think": False, "tools": tools}
    several, own = read(CHAT, TEXT, defaults={"n": 3})
    assert (several.n, own.n) == (3, 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"temperature": 1.0}),
        (["--temperature", "0"], {"temperature": 0.0}),
        (["--sampling-defaults"], {"temperature": 0.6, "top_p": 0.9}),
        (["--sampling-defaults", "--temperature", "0.2"], {"temperature": 0.2, "top_p": 0.9}),
    ],
)
def test_sampling_of_bodies_that_do_not_say(options, expected, tiny_config, tmp_path, monkeypatch):
    """The temperature, which they have by default, comes from where the rest does."""
    engine, model, source = FakeEngine(), tmp_path / "model", tmp_path / "in.jsonl"
    monkeypatch.setattr(batch_job, "load", lambda config, **options: engine)
    shutil.copytree(tiny_config.with_name("model"), model)
    recommended = {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(recommended), "utf-8")
    source.write_text(f"{json.dumps(TEXT)}\n{json.dumps(CHAT)}\n", "utf-8")
    files = ["--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    assert batch.main([str(model), *files, *options]) == 0
    nothing, _, own = sorted(engine.params, key=lambda params: params.max_new_tokens)
    assert {"temperature": nothing.temperature, "top_p": nothing.top_p} == {"top_p": 1.0, **expected}
    assert own.temperature == 0.5


IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
REFUSED = [
    (line(body={"colour": 1}), "unknown field 'colour'; known: model, ", "colour"),
    (line(body={"temperature": "hot"}), "temperature must be a number", "temperature"),
    (line(body={"messages": [{"role": "user", "content": 3}]}), r"messages\[0\].*content", "messages"),
    (line(body={"messages": IMAGE}), r"messages\[0\].*, got 'image_url'", "messages"),
    (line(body={"stream": True}), "stream: a batch has whole answers", "stream"),
    (line(TEXT, body={"best_of": 3}), "best_of: a batch draws no more answers than it writes", "best_of"),
    (line(TEXT, body={"echo": True}), "echo: a batch writes answers alone", "echo"),
    (line(TEXT, body={"prompt": ["a", "b"]}), "prompt: a line of a batch has one prompt", "prompt"),
    (line(method="GET"), "method must be 'POST', got 'GET'", "method"),
    (line(url="/v1/embeddings"), "url must be '/v1/chat/completions' or '/v1/completions', got", "url"),
    (line(url=["a"]), "url must be", "url"),
    (line(extra=1), f"unknown field 'extra'; known: {', '.join(KEYS)}", "extra"),
    (
        line(body={"response_format": {"type": "json_object", "schema": {}}}),
        "response_format: unknown field 'schema'; did you mean 'json_schema'",
        "response_format.schema",
    ),
    (line(body={"model": None}), "model is missing", "model"),
]


@pytest.mark.parametrize(("values", "problem", "field"), REFUSED)
def test_a_bad_request_is_answered_with_openais_error(read, values, problem, field):
    bad, good = read(values, line(custom_id="good"))
    assert isinstance(good, Row)
    assert re.search(f"line 1: {problem}", str(bad))
    response = bad.record["response"]
    assert (bad.record["custom_id"], response["status_code"]) == (values["custom_id"], 400)
    error = response["body"]["error"]
    assert error["param"].startswith(field)
    assert re.search(problem, error["message"])
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("custom_id", [3, "", ["a"], "\ud800"])
def test_a_line_without_a_name_has_no_answer(read, custom_id):
    (bad,) = read(line(custom_id=custom_id))
    assert (isinstance(bad, RowError), bad.record) == (True, None)
    assert "custom_id" in str(bad)


def test_a_name_is_taken_once(read):
    _, second, third = read(CHAT, CHAT, line(body={"colour": 1}))
    assert "id 'chat' is taken by" in str(second)
    assert (second.record, third.record) == (None, None)


@pytest.fixture
def run(tmp_path, tiny_config, monkeypatch):
    """Runs the command over lines; returns its exit status and the output's lines by their custom_id."""
    monkeypatch.setattr(batch_job, "load", lambda config, **options: FakeEngine())

    def start(*options, lines):
        source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps(each) + "\n" for each in lines), "utf-8")
        words = ["--input", str(source), "--output", str(output), "--seed", "3", *options]
        status = batch.main([str(tiny_config), *words])
        written = [json.loads(each) for each in output.read_text("utf-8").splitlines()]
        assert len({each["custom_id"] for each in written}) == len(written)
        return status, {each["custom_id"]: each for each in written}

    return start


BAD = line(custom_id="bad", url="/v1/embeddings")
LONG = asks("long", "long")


def test_a_file_in_and_a_file_out(run):
    status, found = run(lines=[BAD, CHAT, TEXT, LONG, asks("fail", "fails")])
    assert status == 1
    assert set(found) == {"chat", "text", "long", "bad"}
    for each in found.values():
        assert list(each)[:4] == ["id", "custom_id", "response", "error"]
        assert each["id"].startswith("batch_req_")
        assert each["response"]["request_id"].startswith("req_")
        assert each["error"] is None
    chat, text = found["chat"]["response"], found["text"]["response"]
    assert (chat["status_code"], text["status_code"]) == (200, 200)
    assert (chat["body"]["object"], text["body"]["object"]) == ("chat.completion", "text_completion")
    assert chat["body"]["model"] == "gpt-4o-mini"
    assert chat["body"]["usage"]["completion_tokens"] == 4
    (choice,) = chat["body"]["choices"]
    assert (choice["message"]["role"], len(choice["message"]["content"].split())) == ("assistant", 4)
    assert choice["finish_reason"] == "length"
    assert [each["index"] for each in text["body"]["choices"]] == [0, 1]
    assert len({each["text"] for each in text["body"]["choices"]}) == 2
    assert found["long"]["response"]["body"]["error"]["message"] == "messages: prompt is too long"
    assert found["long"]["response"]["status_code"] == found["bad"]["response"]["status_code"] == 400


def test_a_run_goes_on_where_it_ended(run, capsys):
    lines = [CHAT, BAD, LONG]
    status, first = run(lines=lines)
    assert status == 1
    status, second = run("--resume", lines=[*lines, TEXT])
    assert set(second) == {"chat", "bad", "long", "text"}
    assert {name: second[name] for name in first} == first
    assert "3 answered before" in capsys.readouterr().out
    assert status == 0
    assert run("--resume", lines=[line(body={"temperature": 0.7}), *lines[1:], TEXT])[0] == 2
    assert "line 1 is not what was answered as 'chat'" in capsys.readouterr().err


def test_other_programs_do_not_take_such_a_line(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(CHAT), "utf-8")
    (row,) = read_rows(path)
    assert "unknown key 'custom_id'; known: id, prompt" in str(row)
