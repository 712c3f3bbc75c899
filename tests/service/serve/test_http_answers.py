"""Answers as OpenAI's client reads them, equal to the engine's own."""

import json
import math
import subprocess
from dataclasses import replace

import pytest

from jaxspec import AsyncEngine, SamplingParams
from jaxspec.service.batch.run import BatchRun, _PendingRow
from jaxspec.service.openai import CHAT as CHAT_PATH
from jaxspec.service.openai import COMPLETIONS, RequestError, read_body
from jaxspec.service.rows import Form, make_row
from jaxspec.service.serve.answering import Answering

LINES = Form(openai=True)
CHAT = [{"role": "user", "content": "w6 w7"}]
GREEDY = {"temperature": 0, "max_tokens": 24}
LONG = {**GREEDY, "extra_body": {"ignore_eos": True}}


def expected(engine, prompt=CHAT, **options):
    return engine.generate(prompt, **{"max_new_tokens": 24, "ignore_eos": True, **options})


def test_a_chat(client, tiny_engine):
    answer = client.chat.completions.create(model="tiny", messages=CHAT, **LONG)
    ours = expected(tiny_engine)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ours.text)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "tiny", "chatcmpl-")
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens) == (len(ours.prompt_token_ids), 24)
    assert used.total_tokens == used.prompt_tokens + 24
    details = used.completion_tokens_details.model_dump()
    assert (details["drafted_tokens"], details["accepted_tokens"]) == (
        ours.stats.drafted,
        ours.stats.accepted,
    )
    told = answer.model_dump()["metrics"]["speculative_decoding"]
    assert (told["num_spec_steps"], told["num_draft_tokens"]) == (ours.stats.draft_steps, ours.stats.drafted)
    assert ours.stats.drafted > ours.stats.accepted  # wiring/test_serve_options.py has accepted ones


def test_a_completion_of_each_form_of_prompt(client, tiny_engine):
    ask = {"model": "tiny", **LONG}
    ours = expected(tiny_engine, "w6 w7", raw=True)
    for prompt in ("w6 w7", [6, 7]):
        answer = client.completions.create(prompt=prompt, **ask)
        assert (answer.object, answer.choices[0].text) == ("text_completion", ours.text)
        assert answer.usage.prompt_tokens == len(ours.prompt_token_ids)
    others = [expected(tiny_engine, prompt, raw=True).text for prompt in ("w8", "w9 w10")]
    for prompts in (["w8", "w9 w10"], [[8], [9, 10]]):
        answer = client.completions.create(prompt=prompts, n=2, **ask)
        assert [choice.text for choice in answer.choices] == [text for text in others for _ in range(2)]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 96)


def test_without_a_limit_a_chat_ends_with_the_model_and_a_completion_after_16(client, tiny_engine):
    body = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
    chat = client.chat.completions.create(messages=CHAT, **body)
    assert chat.usage.total_tokens == tiny_engine.max_model_len
    assert client.completions.create(prompt="w6", **body).usage.completion_tokens == 16


@pytest.mark.parametrize("pages", [2, 100])
def test_lengths_that_nobody_gives_fit_what_is_asked_and_the_cache(tiny_engine, monkeypatch, pages):
    """In requests alone, as if the engine had more positions, and this cache."""
    size = tiny_engine.config.page_size
    config = replace(tiny_engine.config, num_pages=pages, max_model_len=1000)
    monkeypatch.setattr(tiny_engine, "config", config)
    monkeypatch.setattr(tiny_engine, "max_model_len", 1000)
    answering, room = Answering(AsyncEngine(tiny_engine)), min(1000, pages * size)
    chat = {"model": "m", "messages": CHAT}
    text = {"model": "m", "prompt": "w6 w7"}
    asked = [
        read_body(chat, CHAT_PATH),
        read_body(text, COMPLETIONS),
        read_body({**text, "max_tokens": 3}, COMPLETIONS),
    ]
    (one,), (other,), (short,) = (answering._make(each).answers for each in asked)
    assert one.max_new_tokens == room - len(one.prompt)
    assert (other.max_new_tokens, short.max_new_tokens) == (min(16, room - 2), 3)
    if pages > 2:
        (one,) = answering._make(read_body({**chat, "min_tokens": 300}, CHAT_PATH)).answers
        (other,) = answering._make(read_body({**text, "min_tokens": 300}, COMPLETIONS)).answers
        assert (one.max_new_tokens, other.max_new_tokens) == (room - len(one.prompt), 300)
        row = make_row(
            "", {"custom_id": "a", "url": CHAT_PATH, "body": {**chat, "min_tokens": 300}}, 0, LINES
        )
        request = BatchRun(tiny_engine, [row], SamplingParams())._request(_PendingRow(0, row, []))
        assert request.max_new_tokens == one.max_new_tokens
    else:
        with pytest.raises(RequestError, match="min_tokens: 300 do not fit") as error:
            answering._make(read_body({**chat, "min_tokens": 300}, CHAT_PATH))
        assert (error.value.field, error.value.code) == ("min_tokens", "context_length_exceeded")


def test_without_a_temperature_it_is_1(client, tiny_engine):
    ask = {"max_tokens": 24, "seed": 5, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(model="tiny", messages=CHAT, **ask)
    assert answer.choices[0].message.content == expected(tiny_engine, temperature=1.0, seed=5).text


def test_several_answers_are_those_of_the_engine(client, tiny_engine):
    ask = {"temperature": 1.0, "seed": 5, "max_tokens": 24, "n": 3, "extra_body": {"ignore_eos": True}}
    ours = [answer.text for answer in expected(tiny_engine, temperature=1.0, seed=5, n=3)]
    assert len(set(ours)) == 3
    answer = client.chat.completions.create(model="tiny", messages=CHAT, **ask)
    assert [choice.message.content for choice in answer.choices] == ours
    pieces = ["", "", ""]
    for chunk in client.chat.completions.create(model="tiny", messages=CHAT, stream=True, **ask):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == ours


def test_equal_prompts_are_samples_of_one(client, tiny_engine):
    ours = tiny_engine.generate(
        ["w6", "w6"], raw=True, temperature=1.0, seed=5, max_new_tokens=16, ignore_eos=True
    )
    answer = client.completions.create(
        model="tiny", prompt=["w6", "w6"], seed=5, max_tokens=16, extra_body={"ignore_eos": True}
    )
    texts = [choice.text for choice in answer.choices]
    assert texts == [generation.text for generation in ours]
    assert len(set(texts)) == 2


def test_the_best_of_several(client, tiny_engine):
    ours = tiny_engine.generate(
        "w6", raw=True, temperature=1.0, seed=5, max_new_tokens=16, n=2, best_of=4, ignore_eos=True
    )
    ask = {"seed": 5, "n": 2, "best_of": 4, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(model="tiny", prompt="w6", **ask)
    assert [choice.text for choice in answer.choices] == [generation.text for generation in ours]
    assert answer.choices[0].logprobs is None


def test_a_stream(client, tiny_engine):
    ours = expected(tiny_engine)
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, stream=True, stream_options={"include_usage": True}, **LONG
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *pieces, end, counts = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert len(pieces) > 3
    assert "".join(piece.choices[0].delta.content for piece in pieces) == ours.text
    assert [piece.choices[0].finish_reason for piece in (pieces[0], end)] == [None, "length"]
    assert (counts.choices, counts.usage.completion_tokens) == ([], 24)
    assert counts.usage.completion_tokens_details.model_dump()["accepted_tokens"] == ours.stats.accepted
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    told = counts.model_dump()["metrics"]["speculative_decoding"]
    assert told["num_accepted_draft_tokens"] == ours.stats.accepted
    assert not any("metrics" in chunk.model_dump() for chunk in chunks[:-1])


def test_a_streamed_completion_without_usage(client, tiny_engine):
    chunks = list(client.completions.create(model="tiny", prompt="w6 w7", stream=True, **LONG))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(tiny_engine, "w6 w7", raw=True).text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)


def test_events_are_lines_of_data_that_end_with_done(http):
    body = {"model": "tiny", "messages": CHAT, "stream": True, "max_tokens": 3}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") for event in events)


def test_log_probabilities_of_a_chat(client, tiny_engine):
    ours = expected(tiny_engine, logprobs=2)
    ask = {"model": "tiny", "messages": CHAT, "logprobs": True, "top_logprobs": 2, **LONG}
    content = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx(ours.logprobs, abs=1e-4)
    assert [len(entry.top_logprobs) for entry in content] == [2] * 24
    for entry, top in zip(content, ours.top_logprobs, strict=True):
        texts = [tiny_engine.tokenizer.token_bytes(token).decode() for token in top]
        assert [each.token for each in entry.top_logprobs] == texts
        assert bytes(entry.bytes).decode() == entry.token
    assert "".join(entry.token for entry in content).strip() == ours.text
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(stream=True, **ask)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    assert streamed == [entry.token for entry in content]


def test_log_probabilities_of_a_completion(client, tiny_engine):
    ours = expected(tiny_engine, "w6 w7", raw=True, logprobs=2)
    answer = client.completions.create(model="tiny", prompt="w6 w7", logprobs=2, **LONG)
    told = answer.choices[0].logprobs
    assert told.token_logprobs == pytest.approx(ours.logprobs, abs=1e-4)
    assert [len(top) for top in told.top_logprobs] == [2] * 24
    text = answer.choices[0].text
    assert [text[at:].split()[0] for at in told.text_offset] == text.split()
    assert all(math.isfinite(value) for value in told.token_logprobs)


def test_the_prompt_stands_before_the_answer(client, tiny_engine):
    ask = {"model": "tiny", "echo": True, **LONG}
    ours = expected(tiny_engine, "w6 w7", raw=True)
    for prompt in ("w6 w7", [6, 7]):
        answer = client.completions.create(prompt=prompt, **ask)
        assert answer.choices[0].text == f"w6 w7 {ours.text}"
        assert answer.choices[0].logprobs is None
        assert answer.usage.prompt_tokens == len(ours.prompt_token_ids)
    pieces = [each.choices[0].text for each in client.completions.create(prompt="w6 w7", stream=True, **ask)]
    assert (pieces[0], "".join(pieces)) == ("w6 w7", f"w6 w7 {ours.text}")
    answer = client.completions.create(prompt="w6 w7", **{**ask, "max_tokens": 0})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("w6 w7", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 0)


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_prompts(client, tiny_engine, most, top):
    """As `lm_eval --model local-completions` asks, with a token or without, and reads them."""
    prompts = [[6, 7, 8, 9], [10, 11, 12]]
    ask = {"model": "tiny", "echo": True, "temperature": 0, "logprobs": top, "max_tokens": most}
    ask["extra_body"] = {"ignore_eos": True}
    scores = tiny_engine.score(prompts, top=top)
    answer = client.completions.create(prompt=prompts, n=2, **ask)
    assert len(answer.choices) == 4
    for choice in answer.choices:
        i, told = choice.index // 2, choice.logprobs
        size = len(prompts[i])
        ours = scores.logprobs[i, 1:size].tolist()
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[1:size] == pytest.approx(ours, abs=1e-4)
        assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == size + most
        assert told.tokens[:size] == [f" w{token}" for token in prompts[i]]
        assert [choice.text[at:].split()[0] for at in told.text_offset] == choice.text.split()
        if top:
            assert told.top_logprobs[0] is None
            assert [len(each) for each in told.top_logprobs[1:]] == [2] * (size + most - 1)
            tops = scores.top_tokens[i, 1].tolist(), scores.top_logprobs[i, 1].tolist()
            likely = {f" w{token}": value for token, value in zip(*tops, strict=True)}
            assert told.top_logprobs[1] == pytest.approx(likely, abs=1e-4)
        else:
            assert told.top_logprobs is None
    (first, *_, counted) = client.completions.create(
        prompt=prompts[0], stream=True, stream_options={"include_usage": True}, **ask
    )
    assert first.choices[0].logprobs.token_logprobs == answer.choices[0].logprobs.token_logprobs[:4]
    assert first.choices[0].text == "w6 w7 w8 w9"
    assert (counted.usage.prompt_tokens, counted.usage.completion_tokens) == (4, most)


def test_the_likeliest_token_is_known_by_its_number(client, tiny_engine):
    """So that a greedy continuation is told from others, as lm_eval does."""
    greedy = tiny_engine.generate([6, 7], max_new_tokens=6, ignore_eos=True).token_ids
    other = [*greedy[:3], (greedy[3] + 1) % 40 + 4, *greedy[4:]]
    ask = {"model": "tiny", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    answer = client.completions.create(prompt=[[6, 7, *greedy], [6, 7, *other]], **ask)
    found = []
    for choice in answer.choices:
        told = zip(choice.logprobs.token_logprobs[2:-1], choice.logprobs.top_logprobs[2:-1], strict=True)
        found.append(all(value == max(top.values()) for value, top in told))
    assert found == [True, False]


def test_a_stop_string_ends_an_answer(client, tiny_engine):
    word = expected(tiny_engine).text.split()[3]
    answer = client.chat.completions.create(model="tiny", messages=CHAT, stop=[word], **LONG)
    assert answer.choices[0].finish_reason == "stop"
    assert word not in answer.choices[0].message.content


def test_models(client, tiny_engine):
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "jaxspec")
    assert model.model_dump()["max_model_len"] == tiny_engine.max_model_len
    assert client.models.retrieve("tiny") == model


def test_health(http, tiny_engine, monkeypatch):
    from jaxspec import EngineError

    assert http.get("/health").json() == {"status": "ok"}
    monkeypatch.setattr(tiny_engine.core, "error", EngineError("the device failed: it is a test"))
    answer = http.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the device failed: it is a test"
    assert http.post("/v1/completions", json={"model": "tiny", "prompt": "w6"}).status_code == 503


def test_curl(server, tiny_engine):
    body = {"model": "tiny", "messages": CHAT, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    command = ["curl", "-sS", "--noproxy", "*", f"{server.url}/v1/chat/completions"]
    command += ["-H", "Content-Type: application/json"]
    told = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, check=True)
    assert json.loads(told.stdout)["choices"][0]["message"]["content"] == expected(tiny_engine).text
    body["stream"] = True
    told = subprocess.run(
        [*command, "-N", "-d", json.dumps(body)], capture_output=True, text=True, check=True
    )
    assert told.stdout.endswith("data: [DONE]\n\n")
