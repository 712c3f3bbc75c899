"""Bodies of OpenAI's requests: what they ask an engine for, and errors that name the field."""

import pytest

from jaxspec import SamplingParams
from jaxspec.service.openai import CHAT, COMPLETIONS, FIELDS, RequestError, read_body
from jaxspec.service.openai.requests import SAMPLING

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields):
    return read_body({"model": "m", "messages": MESSAGES, **fields}, CHAT)


def completion(**fields):
    return read_body({"model": "m", "prompt": "hi", **fields}, COMPLETIONS)


def test_the_least_that_a_body_says():
    """Temperature 1 and 16 tokens are OpenAI's defaults, not ours."""
    asked = chat()
    assert (asked.model, asked.prompts, asked.is_chat) == ("m", [MESSAGES], True)
    assert (asked.n, asked.best_of, asked.is_streamed, asked.includes_usage) == (1, None, False, False)
    assert asked.params() == SamplingParams(temperature=1.0)
    asked = completion()
    assert (asked.prompts, asked.is_chat) == (["hi"], False)
    assert asked.params() == SamplingParams(temperature=1.0)
    assert asked.params({}) == SamplingParams()


@pytest.mark.parametrize(
    ("ask", "least", "room", "length"),
    [
        (chat, 0, 1000, 1000),
        (chat, 300, 1000, 1000),
        (completion, 0, 1000, 16),
        (completion, 0, 9, 9),
        (completion, 20, 1000, 20),
    ],
)
def test_how_long_an_answer_is_that_nobody_limits(ask, least, room, length):
    asked = ask(min_tokens=least)
    assert asked.length(asked.params(), room) == length


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5, "seed": 7, "stop": "x"}, {"top_p": 0.5, "seed": 7, "stop": ("x",)}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"stop": ["x", "y"], "temperature": None}, {"stop": ("x", "y")}),
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_new_tokens": 5}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"top_k": 4, "min_p": 0.1, "ignore_eos": True}, {"top_k": 4, "min_p": 0.1, "ignore_eos": True}),
        ({"stop_token_ids": [3]}, {"stop_token_ids": (3,)}),
        ({"num_speculative_tokens": 1}, {"num_speculative_tokens": 1}),
        ({"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}, {}),
        (
            {"presence_penalty": 1, "frequency_penalty": -0.5, "logit_bias": {"7": -100, "9": 1.5}},
            {"presence_penalty": 1.0, "frequency_penalty": -0.5, "logit_bias": {7: -100, 9: 1.5}},
        ),
        (
            {"repetition_penalty": 1.2, "min_tokens": 2, "bad_words": ["a", [1, 2]]},
            {"repetition_penalty": 1.2, "min_tokens": 2, "bad_words": ("a", (1, 2))},
        ),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({"response_format": {"type": "text"}}, {}),
    ],
)
def test_fields_of_a_chat_are_sampling_parameters(fields, expected):
    assert chat(**fields).params() == SamplingParams(**{"temperature": 1.0, **expected})


def test_what_a_body_turns_off_is_off():
    """Whatever is the default, as where the command line of a batch sets it."""
    defaults = {"presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {5: 1.0}}
    off = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
    assert chat().params(defaults) == SamplingParams(**defaults)
    assert chat(**off).params(defaults) == SamplingParams()


def test_every_sampling_parameter_can_be_asked_for():
    """Those that OpenAI's API does not have, by their own names."""
    elsewhere = {"max_new_tokens": "max_tokens", "json_schema": "response_format"}
    for fields in FIELDS.values():
        assert {elsewhere.get(name, name) for name in SAMPLING} <= set(fields)


def test_what_is_not_about_sampling():
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = chat(tools=tools, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}, n=3)
    arguments = {"enable_thinking": False, "tools": tools, "reasoning_effort": "low"}
    assert (asked.prompt_options, asked.n) == ({"chat_template_kwargs": arguments}, 3)
    assert chat(tools=tools, tool_choice="none").prompt_options == {"chat_template_kwargs": {}}
    old = chat(functions=[{"name": "f"}], function_call="auto", tools=None)
    assert old.prompt_options == {"chat_template_kwargs": {"tools": tools}}
    assert chat(functions=[{"name": "f"}], function_call="none").prompt_options == {
        "chat_template_kwargs": {}
    }
    options = {"continue_final_message": True, "special_tokens_as_text": True}
    assert chat(**options).prompt_options == {**options, "chat_template_kwargs": {}}
    assert completion(special_tokens_as_text=True).prompt_options == {
        "special_tokens_as_text": True,
        "raw": True,
    }
    asked = chat(stream=True, stream_options={"include_usage": True})
    assert (asked.is_streamed, asked.includes_usage) == (True, True)
    assert completion(n=2, best_of=4).best_of == 4
    assert completion(n=2, best_of=4).params().logprobs == 0
    assert completion(n=2, best_of=2).best_of is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("hi", ["hi"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_of_a_completion(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("name", ["user", "metadata", "store", "service_tier", "prompt_cache_key"])
def test_fields_that_cannot_change_an_answer_are_accepted(name):
    value = {"metadata": {"a": "b"}, "store": True}.get(name, "x")
    assert chat(**{name: value}).params() == chat().params()
    assert completion(**{name: value}).params() == completion().params()


def test_what_a_client_writes_out_as_null_asks_for_nothing():
    hosted = ("audio", "functions", "function_call", "web_search_options", "prediction", "tools", "seed")
    assert chat(**dict.fromkeys(hosted), verbosity="medium") == chat()


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"model": None}, "model", "model is missing"),
        ({"functions": ["f"]}, "functions[0]", "functions[0] must be an object"),
        ({"functions": [{"name": "f"}], "tools": [{}]}, "functions", "functions: tools are given, too"),
        ({"function_call": {"name": "f"}}, "function_call", "function_call must be "),
        ({"verbosity": "low"}, "verbosity", "verbosity must be 'medium', got 'low'"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": "hi"}, "messages", "messages must be a list, got 'hi'"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "messages[0].role is missing"),
        (
            {"messages": [{"role": "user", "content": 1}]},
            "messages[0].content",
            "messages[0].content must be a string, a list, got 1",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "messages[0].content[0].type must be 'text' or 'refusal', got 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "texd": "b"}]}]},
            "messages[0].content[0].texd",
            "messages[0].content[0]: unknown field 'texd'; did you mean 'text'? known: type, text",
        ),
        ({"temperature": "hot"}, "temperature", "temperature must be a number, 0 or more, got 'hot'"),
        ({"temperature": True}, "temperature", "temperature must be a number, 0 or more, got True"),
        ({"temperature": 1e40}, "temperature", "temperature must be a number, 0 (greedy) or 1e-30"),
        ({"top_p": 0}, "top_p", "top_p must be a number, above 0 and at most 1"),
        ({"n": 129}, "n", "n must be an integer, 1 to 128, got 129"),
        ({"n": 0}, "n", "n must be an integer, 1 to 128, got 0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer, 1 or more"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "is another number"),
        ({"seed": -(2**63) - 1}, "seed", "seed must be an integer, -9223372036854775808 to"),
        ({"stop": ["a", 1]}, "stop[1]", "stop[1] must be a string, got 1"),
        ({"stop": "\ud800"}, "stop", "stop is not valid Unicode"),
        ({"stream": "yes"}, "stream", "stream must be true or false, got 'yes'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "has no effect without stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field 'x'; known: incl"),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs: has no effect without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be an integer, 0 to 20, got 21"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be 'text' or 'json_object'"),
        ({"response_format": {}}, "response_format.type", "response_format.type is missing"),
        ({"response_format": []}, "response_format", "response_format must be an object, got []"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "null"}}},
            "response_format.schema",
            "response_format: unknown field 'schema'; did you mean 'json_schema'? known: type",
        ),
        (
            {"response_format": {"type": "text", "json_schema": {"schema": {"type": "null"}}}},
            "response_format.json_schema",
            "response_format.json_schema must be null, got {'schema'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": None}},
            "response_format.json_schema",
            "response_format.json_schema is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strikt": True}}},
            "response_format.json_schema.strikt",
            "response_format.json_schema: unknown field 'strikt'; did you mean 'strict'?",
        ),
        ({"stop_token_ids": [1.5]}, "stop_token_ids[0]", "must be an integer, 0 or more, got 1.5"),
        ({"n": 2.5}, "n", "n must be an integer, 1 to 128, got 2.5"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice must be 'auto' or 'none'"),
        ({"modalities": ["text", "audio"]}, "modalities[1]", "must be 'text', got 'audio'"),
        ({"presence_penalty": 3}, "presence_penalty", "must be a number, -2 to 2, got 3"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "every id of logit_bias must be an integer, 0 or more"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "every id of logit_bias must be an integer, 0"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "logit_bias of token 5 must be a number, -100 to 100"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "logit_bias.5 must be a number, got 'x'"),
        ({"bad_words": [3]}, "bad_words[0]", "bad_words[0] must be a string, a list, got 3"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "min_tokens must be at most max_tokens, 5"),
        (
            {"max_new_tokens": 5},
            "max_new_tokens",
            "'max_new_tokens'; did you mean 'max_completion_tokens'? known: model, ",
        ),
        ({"prompt": "hi"}, "prompt", "unknown field 'prompt'; known: model, "),
    ],
)
def test_a_bad_chat_is_one_line_that_names_the_field(fields, field, message):
    with pytest.raises(RequestError) as error:
        chat(**fields)
    assert error.value.field == field
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": ["a", 1]}, "prompt[1]", "prompt[1] must be a string, got 1"),
        ({"prompt": [[1], []]}, "prompt[1]", "prompt[1] is empty"),
        ({"prompt": {"a": 1}}, "prompt", "prompt must be a string, a list, a list, a list, got"),
        ({"echo": 1}, "echo", "echo must be true or false, got 1"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer, 1 or more without echo, got 0"),
        ({"suffix": "x"}, "suffix", "suffix must be null, got 'x'"),
        ({"best_of": 2, "n": 3}, "best_of", "best_of must be at least n, 3, got 2"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"logprobs": True}, "logprobs", "logprobs must be an integer, 0 to 20, got True"),
        ({"messages": MESSAGES}, "messages", "unknown field 'messages'"),
    ],
)
def test_a_bad_completion_is_one_line_that_names_the_field(fields, field, message):
    with pytest.raises(RequestError) as error:
        completion(**fields)
    assert error.value.field == field
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, (False, False, False)),
        ({"echo": False, "logprobs": 1}, (False, False, False)),
        ({"echo": True}, (True, False, False)),
        ({"echo": True, "logprobs": 0}, (True, False, True)),
        ({"echo": True, "max_tokens": 0}, (True, True, True)),
    ],
)
def test_what_is_told_of_prompts(fields, told):
    asked = completion(**fields)
    assert (asked.echoes, asked.only_reads, asked.scores_prompts) == told


def test_null_is_nothing_in_nested_objects_too():
    usage = {"include_usage": True, "include_obfuscation": None}
    assert chat(stream=True, stream_options=usage).includes_usage
    assert not chat(stream=True, stream_options={"include_usage": None}).includes_usage
    for kind in ("text", "json_object"):
        assert chat(response_format={"type": kind, "json_schema": None}) == chat(
            response_format={"type": kind}
        )
    schema = {"name": None, "description": None, "strict": None, "schema": {"const": None}}
    asked = chat(response_format={"type": "json_schema", "json_schema": schema})
    assert asked.sampling["json_schema"] == {"const": None}  # of a schema, null is a value
    assert chat(logit_bias={"5": None}) == chat(logit_bias={})
    assert chat(chat_template_kwargs={"a": None}) == chat()
    assert chat(messages=[{**MESSAGES[0], "name": None, "tool_calls": None}]) == chat()
    part = {"type": "text", "text": "hi"}
    parts = [{"role": "user", "content": [{**part, "cache_control": None, "refusal": None}]}]
    with pytest.raises(RequestError, match="unknown field 'refusal'"):
        chat(messages=parts)
    del parts[0]["content"][0]["refusal"]
    assert chat(messages=parts).prompts == [[{"role": "user", "content": [part]}]]


def test_a_whole_number_is_a_whole_number_however_it_is_written():
    """As JSON of languages without integers has them."""
    whole = {"max_tokens": 5.0, "n": 2.0, "seed": -1.0, "top_k": 3.0, "stop_token_ids": [4.0]}
    asked = chat(**whole, bad_words=["a", [1.0, 2.0]], min_tokens=1e0)
    expected = chat(
        max_tokens=5, n=2, seed=-1, top_k=3, stop_token_ids=[4], bad_words=["a", [1, 2]], min_tokens=1
    )
    assert asked == expected
    assert type(asked.n) is int
    for prompt in ([1.0, 2.0], [[1.0, 2.0]]):
        assert completion(prompt=prompt).prompts == [[1, 2]]


@pytest.mark.parametrize("body", [None, [], "x", 1])
def test_a_body_is_an_object(body):
    with pytest.raises(RequestError, match="the body must be an object"):
        read_body(body, CHAT)


def test_errors_of_the_engine_name_the_fields_of_the_body():
    told = chat(max_tokens=5, logprobs=True).error(ValueError("max_new_tokens: 5 do not fit: max_model_len"))
    assert (str(told), told.field) == ("max_tokens: 5 do not fit: max_model_len", "max_tokens")
    assert told.code == "context_length_exceeded"
    told = chat().error(ValueError("prompt of 9 tokens leaves no room to answer: max_model_len is 8"))
    assert (told.field, told.code) == ("messages", "context_length_exceeded")
    assert completion().error(ValueError("prompt: token id 9 is outside")).field == "prompt"
    assert completion().error(ValueError("max_new_tokens: 5 do not fit")).field == "max_tokens"
    told = chat().error(ValueError("prompt of 9 tokens and 5 new ones need more than the cache's 2 pages"))
    assert (told.field, told.code) == ("messages", "context_length_exceeded")
    assert completion().error(ValueError("json_schema: it is too large")).field == "response_format"


def test_a_schema_of_the_answer():
    formats = [
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}},
            {"type": "array"},
        ),
    ]
    for asked, schema in formats:
        for ask in (chat, completion):
            assert ask(response_format=asked).sampling["json_schema"] == schema
    with pytest.raises(RequestError) as error:
        chat(response_format={"type": "json_schema", "json_schema": {"name": "n"}})
    assert error.value.field == "response_format.json_schema.schema"
