"""What the OpenAPI page says of requests and answers."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from jaxspec.service.openai import CHAT, FIELDS, Endpoint, Schema, body_schema, is_closed

_INT = {"type": "integer"}
_TEXT = {"type": "string"}
_MAYBE = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_USAGE = _object(
    prompt_tokens=_INT,
    completion_tokens=_INT,
    total_tokens=_INT,
    prompt_tokens_details=_object(cached_tokens=_INT),
    completion_tokens_details=_object(drafted_tokens=_INT, accepted_tokens=_INT),
)
_SPECULATION = _object(
    mean_acceptance_length={"type": "number"},
    draft_acceptance_rate={"type": "number"},
    acceptance_histogram=_list(_INT),
    num_spec_steps=_INT,
    num_draft_tokens=_INT,
    num_accepted_draft_tokens=_INT,
    num_spec_tokens=_INT,
)
_METRICS = _object(speculative_decoding={"anyOf": [_SPECULATION, {"type": "null"}]})
_LOGPROBS = {"type": ["object", "null"]}
_REASON = {"type": "string", "enum": ["stop", "length"]}
_MESSAGE = _object(role=_TEXT, content=_TEXT, refusal=_MAYBE)
_CHAT_CHOICE = _object(index=_INT, message=_MESSAGE, logprobs=_LOGPROBS, finish_reason=_REASON)
_TEXT_CHOICE = _object(index=_INT, text=_TEXT, logprobs=_LOGPROBS, finish_reason=_REASON)


def _answer(choice: dict[str, Any]) -> dict[str, Any]:
    head = {"id": _TEXT, "object": _TEXT, "created": _INT, "model": _TEXT}
    return _object(**head, choices=_list(choice), usage=_USAGE, metrics=_METRICS)


_MODEL = _object(id=_TEXT, object=_TEXT, created=_INT, owned_by=_TEXT, max_model_len=_INT)
_COMPONENTS = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE, code=_MAYBE)),
    "ChatCompletion": _answer(_CHAT_CHOICE),
    "Completion": _answer(_TEXT_CHOICE),
    "Model": _MODEL,
    "Models": _object(object=_TEXT, data=_list({"$ref": "#/components/schemas/Model"})),
    "Health": _object(status=_TEXT),
}
_ERRORS = {
    400: "A field is wrong; the error names it.",
    401: "The API key is missing or wrong.",
    403: "The request comes from a web page that is not allowed.",
    404: "There is no such model or path.",
    413: "The body is too long.",
    415: "The body is not sent as JSON.",
    429: "The queue is full.",
    503: "The engine is closed or has failed.",
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": _ERRORS[status], **_json("Error")} for status in statuses}


def _json(name: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}


def _get(answer: dict[str, Any], *statuses: int) -> dict[str, Any]:
    responses = {200: {"description": "The answer.", **answer}, **_errors(401, 403, *statuses)}
    return {"response_model": None, "responses": responses}


MODELS = _get(_json("Models"))
MODEL = _get(_json("Model"), 404)
HEALTH = _get(_json("Health"), 503)
METRICS = _get({"content": {"text/plain": {"schema": _TEXT}}})
"""The arguments of the routes of these paths."""


def route(endpoint: Endpoint) -> dict[str, Any]:
    """The arguments of the route of an endpoint that answers prompts."""
    name = "ChatCompletion" if endpoint == CHAT else "Completion"
    body = {"schema": {"$ref": f"#/components/schemas/{name}Request"}}
    # OpenAPI 3.1 has no words for events; a schema would be taken for one of each event.
    content: dict[str, Any] = {**_json(name)["content"], "text/event-stream": {}}
    answer = {"description": "The answer, with stream its events.", "content": content}
    return {
        "response_model": None,
        "responses": {200: answer, **_errors(400, 401, 403, 404, 413, 415, 429, 503)},
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": body}}},
    }


def _request(endpoint: Endpoint, model: str) -> dict[str, Any]:
    """The schema of a body."""
    schema = _published(body_schema(endpoint))
    schema["properties"]["model"]["enum"] = [model]
    return schema


def _published(schema: Schema) -> dict[str, Any]:
    """A schema as the page has it: what may be left out may also be null, and an object with properties has
    no others, as `read` takes them."""
    shown = dict(schema)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            shown[word] = [*map(_published, schema[word])]
    if "items" in schema:
        shown["items"] = _published(schema["items"])
    if "properties" in schema:
        required = schema.get("required", ())
        shown["properties"] = {
            name: _published(each) if name in required else {"anyOf": [_published(each), {"type": "null"}]}
            for name, each in schema["properties"].items()
        }
        shown["additionalProperties"] = not is_closed(schema)
    elif isinstance(others := schema.get("additionalProperties"), Mapping):
        shown["additionalProperties"] = {"anyOf": [_published(others), {"type": "null"}]} if others else True
    return shown


def describe(app: FastAPI, *, model: str, has_key: bool) -> None:
    """Sets the application's OpenAPI page, for the model of this name."""
    page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    requests = {
        f"{'Chat' if endpoint == CHAT else ''}CompletionRequest": _request(endpoint, model)
        for endpoint in FIELDS
    }
    components: dict[str, Any] = {"schemas": {**_COMPONENTS, **requests}}
    page["components"] = components
    for methods in page["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # FastAPI's own, which no route answers
    if has_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
        page["paths"]["/health"]["get"]["security"] = []
    app.openapi = lambda: page  # type: ignore[method-assign]
