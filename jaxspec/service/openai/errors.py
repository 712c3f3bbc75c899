"""Errors as OpenAI's API reports them."""

from typing import Any

from jaxspec.errors import OneLineError


class RequestError(OneLineError):
    """A body that asks for what cannot be done; the message is one line and names the field.

    Attributes:
      field: the field that is wrong, `messages[0].role` for one inside; None if it is none.
      code: what programs may look for, such as "model_not_found"; None for no more than the message says.
      status: the status of an HTTP answer.
    """

    def __init__(
        self, message: object, field: str | None = None, *, code: str | None = None, status: int = 400
    ):
        super().__init__(message)
        self.field, self.code, self.status = field, code, status


def error_object(
    message: str, *, kind: str = "invalid_request_error", field: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
