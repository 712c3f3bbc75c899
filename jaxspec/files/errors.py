"""The exception of this package, and contexts that convert other errors to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxspec.errors import OneLineError


class CheckpointError(OneLineError):
    """A checkpoint, tokenizer or conversation cannot be used; the message names the cause in one line."""


@contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Converts errors of the operating system, naming the file, or `what` if they name none.

    Raises:
      CheckpointError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or what}: cannot be read: {error.strerror or error}"
        ) from None


@contextmanager
def foreign(what: str | Path, problem: str) -> Iterator[None]:
    """Converts any error that a package raises over a file's content, prefixed with `what` and `problem`.

    Some packages raise plain Exception; Rust code may panic, which is a BaseException.

    Raises:
      CheckpointError: in place of everything except KeyboardInterrupt and similar exceptions.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {problem}: {error}") from None
