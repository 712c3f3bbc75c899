"""The one exception of this package, and where what the operating system refuses becomes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxspec.errors import OneLineError


class CheckpointError(OneLineError):
    """A checkpoint, tokenizer or chat that cannot be used; the message names the offender in one line."""


@contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Turns the operating system's errors into ours, naming the file, or `what` where they name none.

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
    """Turns whatever a package raises over a file's content into ours, `what` and `problem` in front.

    For packages that raise plain Exception, and panics of Rust code, which are no Exception at all.

    Raises:
      CheckpointError: in place of anything but KeyboardInterrupt and its like.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {problem}: {error}") from None
