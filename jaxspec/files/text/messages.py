"""Chat messages, in the forms in which people have them, as chat templates read them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.files.errors import CheckpointError


def as_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of OpenAI's forms in the one form that every template reads.

    A message is {"role", "content"}, and may have other keys, which are the template's. Its content is a
    text; parts [{"type": "text", "text": …}], which are joined by line breaks, as vLLM and llama.cpp do; or,
    beside "tool_calls", null or nothing, which becomes "". A refusal, as a part or beside null content, is
    the text that it has. The arguments of a tool call may be JSON in a text, as OpenAI writes them; templates
    get the object. A "function_call" and its answer by the role "function", which OpenAI had before, are the
    tool call and the tool's answer that took their place. Keys that are null are left out.

    Raises:
      CheckpointError: they have another form, hold what is no text, or the list is empty; the text names the
        place.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise CheckpointError(f"messages must be a list of role and content, got {type(messages).__name__}")
    if not messages:
        raise CheckpointError("messages is empty")
    read: list[dict[str, Any]] = []
    call = _CALL.format(0)
    for index, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("function_call") is not None:
            call = _CALL.format(index)
        read.append(_message(f"messages[{index}]", message, call))
    return read


_CALL = "call{:05}"
"""The id of a call that has none, by the number of its message; Mistral's templates ask for nine letters."""


def _message(where: str, message: Any, call: str) -> dict[str, Any]:
    """One message; `call` is the id of the last function that was called."""
    if not isinstance(message, Mapping):
        raise CheckpointError(f"{where} must be a dict, got {type(message).__name__}")
    read = {key: value for key, value in message.items() if value is not None}
    if not isinstance(read.get("role"), str):
        raise CheckpointError(f"{where}['role'] must be a string, got {read.get('role')!r}")
    function = read.pop("function_call", None)
    if read.pop("tool_calls", None):
        read["tool_calls"] = _tool_calls(f"{where}['tool_calls']", message["tool_calls"])
    elif function is not None:
        function = _function(f"{where}['function_call']", function)
        read["tool_calls"] = [{"id": call, "type": "function", "function": function}]
    if read["role"] == "function":
        read = {"tool_call_id": call, **read, "role": "tool"}
    if isinstance(read.get("refusal"), str) and read.get("content") is None:
        read["content"] = read.pop("refusal")
    read["content"] = _content(f"{where}['content']", read.get("content"), "tool_calls" in read)
    if not isinstance(read.get("tool_call_id", ""), str):
        raise CheckpointError(f"{where}['tool_call_id'] must be a string, got {read['tool_call_id']!r}")
    return read


def _content(where: str, content: Any, may_be_missing: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_missing:
        return ""
    if not isinstance(content, list | tuple):
        raise CheckpointError(f"{where} must be a string or a list of parts, got {content!r}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise CheckpointError(f"{where}[{index}] must be a part with a type, got {part!r}")
        if kind not in ("text", "refusal"):
            raise CheckpointError(f"{where}[{index}]: a part of type {kind!r} cannot be read, only text can")
        if not isinstance(part.get(kind), str):
            raise CheckpointError(f"{where}[{index}][{kind!r}] must be a string, got {part.get(kind)!r}")
        texts.append(part[kind])
    return "\n".join(texts)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise CheckpointError(f"{where} must be a list, got {calls!r}")
    read = []
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise CheckpointError(f"{where}[{index}] must have a function, got {call!r}")
        read.append({**call, "function": _function(f"{where}[{index}]['function']", call["function"])})
    return read


def _function(where: str, function: Any) -> dict[str, Any]:
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise CheckpointError(f"{where} must have a name, got {function!r}")
    return {**function, "arguments": _arguments(f"{where}['arguments']", function.get("arguments"))}


def _arguments(where: str, arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise CheckpointError(f"{where} must be an object, or its JSON, got {arguments!r}") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise CheckpointError(f"{where} must be an object, or its JSON, got {arguments!r}")
    return dict(arguments)
