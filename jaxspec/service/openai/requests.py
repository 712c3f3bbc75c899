"""The bodies of OpenAI's requests, in the terms of an engine.

One table of fields is what a body may have, how it is checked, and what the server's OpenAPI page says.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxspec.engine.api.prompts import Prompt
from jaxspec.sampling import MAX_LOGPROBS, SamplingParams
from jaxspec.service.openai.errors import RequestError
from jaxspec.service.openai.schema import Schema, read

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"

MAX_ANSWERS = 128
"""The largest `n`."""
DEFAULT_MAX_TOKENS = 16
"""The most tokens of a completion whose body does not say."""
DEFAULTS: Mapping[str, Any] = {"temperature": 1.0}
"""Sampling parameters of a body that does not set them, as OpenAI's API has them."""

SAMPLING = tuple(each.name for each in dataclasses.fields(SamplingParams))

_STRING: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_PENALTY: Schema = {"type": "number", "minimum": -2, "maximum": 2}
_LIST: Schema = {"type": "array"}
_ANY: Schema = {}


def _number(low: float, high: float | None = None, kind: str = "number") -> Schema:
    return {"type": kind, "minimum": low} | ({} if high is None else {"maximum": high})


_JSON_SCHEMA: Schema = {
    "type": "object",
    "properties": {"name": _STRING, "description": _STRING, "schema": {"type": "object"}, "strict": _FLAG},
    "required": ["schema"],
}
_FORMAT: Schema = {
    "oneOf": [
        # A schema that is null is none.
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}, "json_schema": {"type": "null"}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {"type": {"enum": ["json_schema"]}, "json_schema": _JSON_SCHEMA},
            "required": ["type", "json_schema"],
        },
    ]
}

_PARTS = [
    {
        "type": "object",
        # The last one is about prices, and of no effect.
        "properties": {"type": {"enum": [kind]}, kind: _STRING, "cache_control": {"type": "object"}},
        "required": ["type", kind],
    }
    for kind in ("text", "refusal")
]
"""What a message's content may have in place of one text."""

_BOTH: dict[str, Schema] = {
    "model": {**_STRING, "description": "The model's name, as /v1/models gives it."},
    "temperature": {**_number(0), "default": 1, "description": "0 is greedy."},
    "top_p": {**_number(0, 1), "default": 1, "description": "Above 0."},
    "n": {**_number(1, MAX_ANSWERS, "integer"), "default": 1},
    "seed": {
        **_number(-(2**63), 2**64 - 1, "integer"),
        "description": "The same seed gives the same answer; a negative one is that plus 2**64.",
    },
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}},
        ]
    },
    "presence_penalty": {**_PENALTY, "default": 0},
    "frequency_penalty": {**_PENALTY, "default": 0},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
    "stream": {**_FLAG, "default": False},
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _FLAG, "include_obfuscation": _FLAG},
        "description": "Only with stream.",
    },
    "response_format": _FORMAT,
    "special_tokens_as_text": {**_FLAG, "description": "Special tokens in texts are text."},
}
_CHAT_ONLY: dict[str, Schema] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "role": _STRING,
                "content": {"anyOf": [_STRING, {"type": "array", "items": {"oneOf": _PARTS}}]},
            },
            "required": ["role"],
            "additionalProperties": True,  # the chat template's
        },
    },
    "max_completion_tokens": {**_COUNT, "description": "By default as many as the model has positions for."},
    "max_tokens": {**_COUNT, "description": "The older name of max_completion_tokens."},
    "logprobs": {**_FLAG, "default": False},
    "top_logprobs": {**_number(0, MAX_LOGPROBS, "integer"), "description": "Only with logprobs."},
    "tools": {**_LIST, "items": {"type": "object"}, "description": "Go to the chat template."},
    "tool_choice": {"enum": ["auto", "none"], "description": "With none, no tools go to the template."},
    "functions": {**_LIST, "items": {"type": "object"}, "description": "The older form of tools."},
    "function_call": {"enum": ["auto", "none"], "description": "The older name of tool_choice."},
    "reasoning_effort": {**_STRING, "description": "Goes to the chat template."},
    "chat_template_kwargs": {
        "type": "object",
        "additionalProperties": _ANY,
        "description": "Arguments of the chat template.",
    },
    "continue_final_message": {**_FLAG, "description": "The last message is the answer's beginning."},
}
_COMPLETIONS_ONLY: dict[str, Schema] = {
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            _IDS,
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            {"type": "array", "items": _IDS, "minItems": 1},
        ],
        "description": "Text or token ids, or a list of them; without the chat template.",
    },
    "max_tokens": {
        **_number(0, kind="integer"),
        "default": DEFAULT_MAX_TOKENS,
        "description": "0 only with echo.",
    },
    "logprobs": {**_number(0, MAX_LOGPROBS, "integer")},
    "best_of": {**_number(1, MAX_ANSWERS, "integer"), "description": "At least n; not with stream."},
    "echo": {
        **_FLAG,
        "default": False,
        "description": "The prompt stands before the answer, with logprobs theirs, too.",
    },
    "suffix": {"type": "null"},
}
_NO_EFFECT: dict[str, Schema] = {
    "user": _STRING,
    "metadata": {"type": "object"},
    "store": _FLAG,
    "service_tier": _STRING,
    "safety_identifier": _STRING,
    "prompt_cache_key": _STRING,
    "prompt_cache_retention": _STRING,
}
"""Fields about accounts and hosting, which cannot change an answer here; accepted and ignored."""
_NO_EFFECT_IN_CHAT: dict[str, Schema] = {
    "parallel_tool_calls": _FLAG,
    "prediction": {"type": "object"},
    "modalities": {"type": "array", "items": {"enum": ["text"]}},
    "verbosity": {"enum": ["medium"]},
    **{key: {"type": "null"} for key in ("audio", "web_search_options")},
}
_OWN: dict[str, Schema] = {
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": _number(0, 1),
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "ignore_eos": _FLAG,
    "num_speculative_tokens": {"type": "integer", "minimum": 0},
    "logprobs_mode": {"enum": ["raw_logprobs", "processed_logprobs"]},
    "repetition_penalty": _number(0),
    "bad_words": {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 1}, _IDS]}},
    "min_tokens": {"type": "integer", "minimum": 0},
    "no_repeat_ngram_size": {"type": "integer", "minimum": 0},
    "choice": {"type": "array", "items": _STRING, "minItems": 1},
    "regex": _STRING,
}
"""Schemas of sampling parameters that OpenAI's API does not have, as far as this version has them."""
_ARGUMENTS = ("tools", "reasoning_effort")
"""Fields that are arguments of the chat template."""
_READING = ("continue_final_message", "special_tokens_as_text")
_ELSEWHERE = {"max_new_tokens", "json_schema"}
"""Sampling parameters that a body sets by other names."""


def _own_sampling(taken: Mapping[str, Schema]) -> dict[str, Schema]:
    """Fields of `SamplingParams` that OpenAI's API does not have, by their own names."""
    return {name: _OWN.get(name, _ANY) for name in SAMPLING if name not in taken and name not in _ELSEWHERE}


def _fields(only: Mapping[str, Schema], ignored: Mapping[str, Schema]) -> dict[str, Schema]:
    fields = {**_BOTH, **only, **ignored}
    return {**fields, **_own_sampling(fields)}


FIELDS: Mapping[Endpoint, Mapping[str, Schema]] = {
    CHAT: _fields(_CHAT_ONLY, {**_NO_EFFECT, **_NO_EFFECT_IN_CHAT}),
    COMPLETIONS: _fields(_COMPLETIONS_ONLY, _NO_EFFECT),
}
"""Every field that a body may have, by the endpoint that it is for, with its JSON schema."""
REQUIRED: Mapping[Endpoint, Sequence[str]] = {CHAT: ("model", "messages"), COMPLETIONS: ("model", "prompt")}

LINE: Schema = {
    "type": "object",
    "properties": {
        "custom_id": {"type": "string", "minLength": 1},
        "method": {"enum": ["POST"]},
        "url": {"enum": [CHAT, COMPLETIONS]},
        "body": {"type": "object"},
    },
    "required": ["custom_id", "url", "body"],
}
"""A line of a batch file; its body has the schema of the endpoint that `url` names."""


def body_schema(endpoint: Endpoint) -> Schema:
    """The schema of a body."""
    return {"type": "object", "properties": FIELDS[endpoint], "required": list(REQUIRED[endpoint])}


@dataclass(frozen=True)
class Asked:
    """What a body asks for, in the terms of an engine.

    Attributes:
      endpoint: the one that the body is for.
      model: the model's name.
      prompts: one chat, or texts and token ids, to be used `raw`.
      sampling: the fields of `SamplingParams` that the body sets.
      prompt_options: keywords of `Engine.make_request` that say how to read the prompts.
      n: the number of answers to each prompt.
      best_of: how many are drawn to choose them from; None for no choice.
      is_streamed: whether the answer is sent piece by piece.
      includes_usage: whether a streamed answer ends with the counts of tokens.
      echoes: whether the prompt stands before the answer.
      only_reads: whether there is nothing else, as the answer is to have no tokens.
      names: OpenAI's names of sampling parameters, as the body has them.
    """

    endpoint: Endpoint
    model: str
    prompts: Sequence[Prompt]
    sampling: Mapping[str, Any]
    prompt_options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    best_of: int | None = None
    is_streamed: bool = False
    includes_usage: bool = False
    echoes: bool = False
    only_reads: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether it is for the endpoint of chats."""
        return self.endpoint == CHAT

    @property
    def prompt_field(self) -> str:
        """The name of the field with the prompt."""
        return "messages" if self.is_chat else "prompt"

    @property
    def reports_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return "logprobs" in self.sampling

    @property
    def scores_prompts(self) -> bool:
        """Whether the target reads the prompts for their own sake."""
        return self.echoes and (self.reports_logprobs or self.only_reads)

    def params(self, defaults: Mapping[str, Any] = DEFAULTS) -> SamplingParams:
        """The sampling parameters, over defaults.

        Raises:
          RequestError: a value is out of range.
        """
        with_logprobs = {"logprobs": 0} if self.best_of is not None else {}
        try:
            return SamplingParams(**{**defaults, **with_logprobs, **self.sampling})
        except ValueError as error:
            raise self.error(error) from None

    def length(self, params: SamplingParams, room: int) -> int:
        """The most tokens of an answer where nobody says how many: in a chat all for which there is room.

        Args:
          params: of the answer.
          room: the most tokens that it may have.
        """
        return room if self.is_chat else min(max(DEFAULT_MAX_TOKENS, params.min_tokens), room)

    def error(self, error: ValueError | RecursionError) -> RequestError:
        """An engine's error about the prompt or a parameter, with the name of the body's field."""
        if isinstance(error, RequestError):
            return error
        text = str(error)
        for ours, theirs in {"json_schema": "response_format", **self.names}.items():
            text = re.sub(rf"\b{ours}\b", theirs, text, count=1)
        for name in _ARGUMENTS:
            if f"the chat template does not read {name!r}" in text:
                text = text.replace("chat_template_kwargs", name, 1)
        begin = text.removeprefix("every id of ")
        word = begin[: next((i for i, c in enumerate(begin) if not (c.isalnum() or c == "_")), len(begin))]
        # Lengths that do not fit are what programs look for.
        too_long = ("max_model_len", "makes more than", "do not fit", "more than the cache's")
        code = "context_length_exceeded" if any(each in text for each in too_long) else None
        if word in FIELDS[self.endpoint]:
            return RequestError(text, word, code=code)
        field = self.prompt_field
        return RequestError(text if text.startswith(field) else f"{field}: {text}", field, code=code)


def read_body(body: Any, endpoint: Endpoint, *, n: int = 1) -> Asked:
    """What the body of a request asks for. `null` is the same as nothing.

    Args:
      body: what JSON gave.
      endpoint: the one that it was sent to.
      n: the number of answers where it does not say.

    Raises:
      RequestError: a field is unknown, missing, of the wrong type, or asks for what is not supported.
    """
    try:
        return _read_body(body, endpoint, n)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None


def _read_body(body: Any, endpoint: Endpoint, n: int) -> Asked:
    if not isinstance(body, Mapping):
        raise RequestError(f"the body must be an object, got {type(body).__name__}")
    values = read("", body, body_schema(endpoint))
    for name, value in values.items():
        _check_unicode(name, value)
    sampling = {name: values[name] for name in SAMPLING if name in values and name != "logprobs"}
    if "seed" in sampling:
        sampling["seed"] %= 2**64  # hosted services take signed ones
    _read_format(values.get("response_format"), sampling)
    read_rest = _read_chat if endpoint == CHAT else _read_completion
    stream = values.get("stream", False)
    options = values.get("stream_options")
    if options is not None and not stream:
        raise RequestError("stream_options: has no effect without stream", "stream_options")
    reads = {name: values[name] for name in _READING if name in values}
    asked = Asked(
        endpoint,
        values["model"],
        prompts=[],
        sampling=sampling,
        prompt_options=reads if endpoint == CHAT else {**reads, "raw": True},
        n=values.get("n", n),
        is_streamed=stream,
        includes_usage=(options or {}).get("include_usage", False),
    )
    asked = read_rest(asked, values, sampling)
    asked.params()  # a value out of range is found here, whoever asks
    return asked


def _read_chat(asked: Asked, values: Mapping[str, Any], sampling: dict[str, Any]) -> Asked:
    names = {"logprobs": "top_logprobs"}
    given = [name for name in ("max_completion_tokens", "max_tokens") if name in values]
    if len({values[name] for name in given}) > 1:
        raise RequestError("max_tokens: max_completion_tokens is another number", "max_tokens")
    if given:
        sampling["max_new_tokens"] = values[given[0]]
    names["max_new_tokens"] = given[0] if given else "max_completion_tokens"
    if values.get("logprobs"):
        sampling["logprobs"] = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise RequestError("top_logprobs: has no effect without logprobs", "top_logprobs")
    arguments = dict(values.get("chat_template_kwargs", {}))
    if values.get("functions") and values.get("tools"):
        raise RequestError("functions: tools are given, too", "functions")
    functions = [{"type": "function", "function": each} for each in values.get("functions", [])]
    has_tools = "none" not in (values.get("tool_choice"), values.get("function_call"))
    told = {**values, "tools": (values.get("tools") or functions) if has_tools else None}
    arguments |= {name: told[name] for name in _ARGUMENTS if told.get(name)}
    return dataclasses.replace(
        asked,
        prompts=[values["messages"]],
        prompt_options={**asked.prompt_options, "chat_template_kwargs": arguments},
        names=names,
    )


def _read_completion(asked: Asked, values: Mapping[str, Any], sampling: dict[str, Any]) -> Asked:
    echoes, most = values.get("echo", False), values.get("max_tokens")
    if most == 0 and not echoes:
        raise RequestError("max_tokens must be an integer, 1 or more without echo, got 0", "max_tokens")
    if most:
        sampling["max_new_tokens"] = most
    if "logprobs" in values:
        sampling["logprobs"] = values["logprobs"]
    best_of = values.get("best_of")
    if best_of is not None and best_of < asked.n:
        raise RequestError(f"best_of must be at least n, {asked.n}, got {best_of}", "best_of")
    if best_of is not None and best_of > asked.n and asked.is_streamed:
        raise RequestError("best_of: answers that are chosen at the end cannot be streamed", "best_of")
    prompt = values["prompt"]
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return dataclasses.replace(
        asked,
        prompts=[prompt] if is_one else prompt,
        best_of=best_of if best_of != asked.n else None,
        echoes=echoes,
        only_reads=most == 0,
        names={"max_new_tokens": "max_tokens"},
    )


def _read_format(wanted: Mapping[str, Any] | None, sampling: dict[str, Any]) -> None:
    """Turns `response_format` into a schema of the answer."""
    if wanted is None or wanted["type"] == "text":
        return
    if wanted["type"] == "json_object":
        sampling["json_schema"] = {"type": "object"}
    else:
        sampling["json_schema"] = wanted["json_schema"]["schema"]


def _check_unicode(name: str, value: Any) -> None:
    if isinstance(value, str | list | dict):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError(f"{name} is not valid Unicode", name) from None
