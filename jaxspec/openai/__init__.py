"""OpenAI's API without HTTP: bodies of requests, of answers and of errors."""

from jaxspec.openai.answers import Chunks, Head, answer_body, usage
from jaxspec.openai.errors import RequestError, error_object
from jaxspec.openai.requests import CHAT, COMPLETIONS, DEFAULTS, FIELDS, REQUIRED, Asked, Endpoint, read_body

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "DEFAULTS",
    "FIELDS",
    "REQUIRED",
    "Asked",
    "Chunks",
    "Endpoint",
    "Head",
    "RequestError",
    "answer_body",
    "error_object",
    "read_body",
    "usage",
]
