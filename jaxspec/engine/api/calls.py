"""Requests that one call makes, and what becomes of their answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxspec.engine.errors import EngineError
from jaxspec.engine.host.answer import Generation
from jaxspec.engine.host.request import Request

Result = TypeVar("Result")


@dataclass(frozen=True)
class Call(Generic[Result]):
    """A call, for clients that wait and for those that do not.

    Attributes:
      requests: its requests, in order.
      finish: makes the result from their answers, in the same order.
    """

    requests: list[Request]
    finish: Callable[[Sequence[Generation]], Result]


def check_answers(what: str, answers: Sequence[Generation]) -> int:
    """Checks that all have ended by themselves; returns the version of the weights that made them.

    Raises:
      EngineError: one was aborted or has failed.
    """
    for i, answer in enumerate(answers):
        if answer.finish_reason in ("aborted", "failed"):
            raise EngineError(f"{what} {i} {answer.finish_reason}: {answer.error}")
    return (answers[0].weights_version or 0) if answers else 0
