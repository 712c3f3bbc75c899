"""Lines of OpenAI's batch files: requests of an HTTP API, and what became of them."""

import json
from collections.abc import Mapping
from typing import Any

from jaxspec.files.text.messages import as_messages
from jaxspec.service.openai import LINE, Asked, RequestError, error_object, read, read_body
from jaxspec.service.rows.ids import hash_json

KEYS = tuple(LINE["properties"])
"""The keys of a line."""
NO_ROW = "0"
"""In place of a row's digest."""


class RefusedLine(ValueError):
    """A request that is answered with an error; the message is one line.

    Attributes:
      custom_id: the request's.
      error: what is wrong with it.
    """

    def __init__(self, custom_id: str, error: RequestError):
        super().__init__(error)
        self.custom_id, self.error = custom_id, error

    def record(self, digest: str = NO_ROW) -> dict[str, Any]:
        """The output line; the digest is that of the row, if it is one."""
        problem = error_object(str(self.error), field=self.error.field, code=self.error.code)
        return output_line(self.custom_id, problem, status=self.error.status, digest=digest)


def read_line(values: Mapping[str, Any], n: int) -> tuple[str, Asked]:
    """The id and the request in a line.

    Args:
      n: the number of answers where its body does not say.

    Raises:
      ValueError: there is no valid id.
      RefusedLine: something else is wrong.
    """
    custom_id = values["custom_id"]
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"custom_id must be a text that is not empty, got {custom_id!r}")
    try:
        json.dumps(custom_id, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"custom_id is not valid Unicode: {custom_id!r}") from None
    try:
        return custom_id, _read(values, n)
    except RequestError as error:
        raise RefusedLine(custom_id, error) from None


def _read(values: Mapping[str, Any], n: int) -> Asked:
    line = read("", values, LINE)
    asked = read_body(line["body"], line["url"], n=n)
    if asked.is_streamed:
        raise RequestError("stream: a batch has whole answers", "stream")
    if asked.echoes:
        raise RequestError("echo: a batch writes answers alone", "echo")
    if asked.best_of is not None:
        raise RequestError("best_of: a batch draws no more answers than it writes", "best_of")
    if len(asked.prompts) > 1:
        raise RequestError("prompt: a line of a batch has one prompt", "prompt")
    if asked.is_chat:
        try:
            as_messages(asked.prompts[0])
        except ValueError as error:
            raise asked.error(error) from None
    return asked


def row_values(asked: Asked, defaults: Mapping[str, Any], hosted: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Row` that a request sets.

    Args:
      defaults: what rows have that do not say otherwise, as in `Form`.
      hosted: sampling parameters of requests that do not set them, as in `Form`.
    """
    options = dict(asked.prompt_options)
    own = options.pop("chat_template_kwargs", {})
    options.pop("raw", None)
    flags = {name: value for name, value in defaults.items() if isinstance(value, bool)}
    if not asked.is_chat:  # it has no messages
        flags.pop("continue_final_message", None)
    arguments = defaults.get("chat_template_kwargs", {}) if asked.is_chat else {}
    prompt: Any = asked.prompts[0]
    return {
        "prompt": as_messages(prompt) if asked.is_chat else prompt,
        "sampling": {**hosted, **asked.sampling},
        "chat_template_kwargs": {**arguments, **own},
        "n": None if asked.n == 1 else asked.n,
        **(flags if not _is_ids(prompt) else {}),
        **options,
    }


def _is_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and isinstance(prompt[0], int)


def output_line(
    custom_id: str, body: Mapping[str, Any], *, status: int = 200, digest: str = NO_ROW
) -> dict[str, Any]:
    """The output line of a request.

    Args:
      body: of the answer, or the error object.
      digest: the row's, with which a run that is resumed compares.
    """
    name = hash_json([custom_id, digest], 12).hex()
    response = {"status_code": status, "request_id": f"req_{name}", "body": body}
    return {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": response,
        "error": None,
        "input_digest": digest,
    }
