"""OpenAI's API without HTTP: bodies of requests, of answers and of errors."""

from jaxspec.service.openai.answers import Chunks, Echo, Head, answer_body, counts
from jaxspec.service.openai.errors import RequestError, error_object
from jaxspec.service.openai.requests import (
    CHAT,
    COMPLETIONS,
    DEFAULTS,
    FIELDS,
    LINE,
    Asked,
    Endpoint,
    body_schema,
    read_body,
)
from jaxspec.service.openai.schema import Schema, is_closed, read

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "DEFAULTS",
    "FIELDS",
    "LINE",
    "Asked",
    "Chunks",
    "Echo",
    "Endpoint",
    "Head",
    "RequestError",
    "Schema",
    "answer_body",
    "body_schema",
    "counts",
    "error_object",
    "is_closed",
    "read",
    "read_body",
]
