"""Messages in the forms that OpenAI's clients send, as a chat template reads them."""

import json

import pytest

from jaxspec.files import CheckpointError
from jaxspec.files.text.messages import as_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "sum", "arguments": '{"a": [1, 2]}'}}


def test_a_conversation_with_a_tool():
    conversation = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "1 + 2?", "name": "Ann"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "assistant", "content": "3.", "tool_calls": None},
    ]
    read = as_messages(conversation)
    assert read == [
        {"role": "system", "content": "Be\nbrief."},
        conversation[1],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "sum", "arguments": {"a": [1, 2]}}}],
        },
        conversation[3],
        {"role": "assistant", "content": "3."},
    ]
    assert as_messages(read) == read
    assert json.loads(CALL["function"]["arguments"]) == {"a": [1, 2]}


@pytest.mark.parametrize(
    "answer",
    [
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": None, "refusal": "No.", "audio": None},
        {"refusal": "No."},
    ],
)
def test_a_refusal_is_the_text_of_its_message(answer):
    assert as_messages([{"role": "assistant", **answer}]) == [{"role": "assistant", "content": "No."}]


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_a_call_without_arguments_has_none(arguments):
    call = {"function": {"name": "now", "arguments": arguments}}
    (message,) = as_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_calls_of_functions_as_openai_had_them_before_are_calls_of_tools():
    function = {"name": "sum", "arguments": '{"a": [1, 2]}'}
    old = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "sum", "content": "3"},
        {"role": "assistant", "content": "3.", "function_call": None},
    ]
    read = as_messages(old)
    call = {"id": "call00001", "type": "function", "function": {"name": "sum", "arguments": {"a": [1, 2]}}}
    assert read == [
        old[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "sum", "content": "3"},
        {"role": "assistant", "content": "3."},
    ]
    assert as_messages(read) == read
    both = {**old[1], "tool_calls": [CALL]}
    assert as_messages([both])[0]["tool_calls"][0]["id"] == "c1"


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (
            {"content": [{"type": "text", "text": "a"}, IMAGE]},
            r"\['content'\]\[1\]: a part of type 'image_url'",
        ),
        ({"content": [{"type": "input_audio"}]}, "'input_audio' cannot be read, only text can"),
        ({"content": ["a"]}, r"\['content'\]\[0\] must be a part with a type, got 'a'"),
        ({"content": [{"type": "text"}]}, r"\['content'\]\[0\]\['text'\] must be a string, got None"),
        ({"content": [{"type": "refusal"}]}, r"\['content'\]\[0\]\['refusal'\] must be a string, got None"),
        ({"content": None}, r"\['content'\] must be a string or a list of parts, got None"),
        ({"tool_calls": []}, r"\['content'\] must be a string or a list of parts, got None"),
        ({"content": 3}, r"\['content'\] must be a string or a list of parts, got 3"),
        ({"content": "a", "tool_call_id": 1}, r"\['tool_call_id'\] must be a string, got 1"),
        ({"tool_calls": "sum"}, r"\['tool_calls'\] must be a list, got 'sum'"),
        ({"tool_calls": [{}]}, r"\['tool_calls'\]\[0\] must have a function, got {}"),
        (
            {"tool_calls": [{"function": {}}]},
            r"\['tool_calls'\]\[0\]\['function'\] must have a name, got {}",
        ),
        ({"function_call": "auto"}, r"\['function_call'\] must have a name, got 'auto'"),
        (
            {"function_call": {"name": "a", "arguments": "{"}},
            r"\['function_call'\]\['arguments'\] must be an",
        ),
        (
            {"tool_calls": [{"function": {"name": "a", "arguments": "{"}}]},
            r"\['arguments'\] must be an object",
        ),
        (
            {"tool_calls": [{"function": {"name": "a", "arguments": "[" * 10**5}}]},
            "must be an object, or its",
        ),
        (
            {"tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]},
            r"object, or its JSON, got \[1\]",
        ),
    ],
)
def test_what_no_template_could_read_is_named_with_its_place(message, problem):
    with pytest.raises(CheckpointError, match=r"messages\[1\]" + ".*" + problem) as raised:
        as_messages([{"role": "user", "content": "a"}, {"role": "assistant", **message}])
    assert "\n" not in str(raised.value)
